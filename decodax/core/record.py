"""Log-probabilities of the chosen tokens and of the most likely tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.pallas_kernels.vocabulary import top_k


@struct
class Record(Struct):
    """Natural log-probabilities of tokens, with any leading axes `...`.

    Attributes:
        raw: `f32[...]`, the chosen token under the model.
        processed: `f32[...]`, the chosen token under the sampling policy; 0 for greedy rows.
        top_ids: `i32[..., n]`, the most likely tokens of the model.
        top: `f32[..., n]`, their log-probabilities under the model.
    """

    raw: Array
    processed: Array
    top_ids: Array
    top: Array

    @property
    def count(self) -> int:
        """Number `n` of most likely tokens."""
        return self.top.shape[-1]


def empty_record(shape: tuple[int, ...], count: int) -> Record:
    """Returns a record of zeros with leading axes `shape` and `count` most likely tokens."""
    zeros = lambda *more: jnp.zeros((*shape, *more), jnp.float32)
    return Record(zeros(), zeros(), jnp.zeros((*shape, count), jnp.int32), zeros(count))


def record(logits: Array, log_probs: Array, tokens: Array, count: int) -> Record:
    """Computes a record.

    Args:
        logits: `f32[..., V]`, logits of the model.
        log_probs: `f32[..., V]`, log-probabilities under the policy.
        tokens: `i32[...]`, the chosen tokens.
        count: number of most likely tokens.
    """
    raw = jax.nn.log_softmax(logits, axis=-1)
    at = lambda x: jnp.take_along_axis(x, jnp.maximum(tokens, 0)[..., None], -1)[..., 0]
    top, ids = top_k(raw, count) if count else (raw[..., :0], jnp.zeros((*tokens.shape, 0), jnp.int32))
    return Record(at(raw), at(log_probs), ids, top)
