"""Log-probabilities of chosen tokens, raw and processed, and of the most likely ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.pallas_kernels.vocabulary import top_k


@struct
class Record(Struct):
    """Natural log-probabilities of tokens, over any leading axes `...`.

    Attributes:
        raw: `f32[...]` of the chosen token under the model. processed: the same under the policy (0 for greedy rows).
        top_ids, top: `i32[..., n]` and `f32[..., n]` the model's most likely tokens and their raw log-probabilities.
    """

    raw: Array
    processed: Array
    top_ids: Array
    top: Array

    @property
    def count(self) -> int:
        """How many most likely tokens are kept."""
        return self.top.shape[-1]


def empty_record(shape: tuple[int, ...], count: int) -> Record:
    """A record of zeros."""
    zeros = lambda *more: jnp.zeros((*shape, *more), jnp.float32)
    return Record(zeros(), zeros(), jnp.zeros((*shape, count), jnp.int32), zeros(count))


def record(logits: Array, log_probs: Array, tokens: Array, count: int) -> Record:
    """Reads off a record: raw logits and the policy's log-probabilities `f32[..., V]`, chosen tokens `i32[...]`."""
    raw = jax.nn.log_softmax(logits, axis=-1)
    at = lambda x: jnp.take_along_axis(x, jnp.maximum(tokens, 0)[..., None], -1)[..., 0]
    top, ids = top_k(raw, count) if count else (raw[..., :0], jnp.zeros((*tokens.shape, 0), jnp.int32))
    return Record(at(raw), at(log_probs), ids, top)
