"""NMST: a model whose probability of the end is predicted by a head of its own and tends to 1 ("A Non-monotonic
Self-terminating Language Model", Choi et al., 2023).

The head reads the hidden state `h` of each token, and `s = sigmoid(u . h)`. The end has the probability `(1 - s) (1 -
(1 - epsilon) ** t) + s` at the `t`-th new token; the other tokens share the rest by the network's softmax over them.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.contrastive.contrastive_search import hidden_width
from decodax.algorithms.contrastive.paired import TrainedReadout, tensors_of
from decodax.common.registry import FUNCTIONS
from decodax.core.loaded import Loaded

FILE, NAME = "nmst.safetensors", "end_head.weight"
"""Name of the file with a trained head, and of its tensor."""

EPSILON = 1e-4
"""Default growth of the bound, among the values of the paper."""


@dataclasses.dataclass(frozen=True)
class SelfTerminating(TrainedReadout):
    """A model in which the logit of the end is `u . h` more than the log-sum-exp of all other logits, so that its
    log-odds are `u . h`. The weights are a pair: those of the network, and `u`, `f32[D]`.

    Attributes:
        ends: tokens that end a text. The first one has the predicted probability, and further ones have none.
    """

    ends: tuple[int, ...] = ()

    def read(self, own: Array, hidden: Array, logits: Array) -> Array:
        return with_end_head(own, hidden, logits, self.ends)


def with_end_head(head: Array, hidden: Array, logits: Array, ends: tuple[int, ...]) -> Array:
    """Returns logits in which the end has the log-odds that a head predicts, `f32[..., V]`.

    Args:
        head: `f32[D]`, the weights `u`.
        hidden: `f[..., D]`.
        logits: `f32[..., V]`, the network's.
        ends: see `SelfTerminating`.
    """
    others = logits.at[..., np.asarray(ends)].set(-jnp.inf)
    odds = hidden.astype(jnp.float32) @ head
    return others.at[..., ends[0]].set(odds + jax.nn.logsumexp(others, -1))


@FUNCTIONS.register("algorithms.contrastive.nmst", "A Non-monotonic Self-terminating Language Model",
                    "Choi et al. 2023")
def nmst(lm: Loaded, head: Array | np.ndarray | str | os.PathLike[str], epsilon: float | None = None) -> Any:
    """Returns a model with a trained head for the end of texts, with which every text ends.

    The returned model asks for `nmst_epsilon=epsilon` if a call does not say another value, and it can be combined with
    every decoding method.

    Args:
        lm: the result of `decodax.load`.
        head: `f32[D]`, the head's weights, or the directory that has them, which is also that of the trained network.
        epsilon: growth of the bound, in [0, 1). None: that of the model's generation config, or else 1e-4.

    Raises:
        ValueError: no head in the directory, one of another shape, an `epsilon` out of range, or a model without a
            token that ends a text.
    """
    model = cast(Any, lm)
    if isinstance(head, (str, os.PathLike)):
        found = tensors_of(head, FILE)
        if NAME not in found:
            raise ValueError(f"head: no {NAME!r} in {FILE} of {head}; takes a directory that scripts/train.py tune "
                             "--objective nmst wrote, or weights")
        head = found[NAME]
    weights = jnp.asarray(head, jnp.float32)
    ends = tuple(int(i) for i in model.eos if isinstance(i, int))
    if not ends:
        raise ValueError(f"lm: {model.name!r} has no token that ends a text; takes one with eos_token_id")
    if weights.ndim != 1 or weights.shape[0] != (width := hidden_width(model)):
        raise ValueError(f"head: got shape {weights.shape}, takes ({width},)")
    epsilon = model.generation_config.get("nmst_epsilon", EPSILON) if epsilon is None else epsilon
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon: got {epsilon}, takes 0 to below 1")
    return dataclasses.replace(model, model=SelfTerminating(model.model, ends), params=(model.params, weights),
                               generation_config={**model.generation_config, "nmst_epsilon": epsilon})
