"""The tuning of lexical unit decoding, LUD ("Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical
Units for LLMs", Sun et al., 2024): the model learns to predict the tokens of a unit at once, at placeholders.

A lexical unit is a run of tokens that the model itself, before the training, predicts with a probability above a
threshold each. In training data a unit's tokens after the first are replaced by placeholders, and the tokens to predict
remain the true ones. The paper's code was not at hand; in what the paper does not say here (one unit a row, the share
of ordinary rows, the beginning of a unit) the objective is that of SPACE, with masks only inside units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.train.language_model import token_losses
from decodax.train.tuning.examples import ExampleRows
from decodax.train.tuning.space import SemiAutoregressiveLoss

Tree = Any


@dataclass(frozen=True)
class LexicalUnitLoss(SemiAutoregressiveLoss):
    """LUD's loss, an `Objective`: the mean over rows of their mean cross-entropies. A unit is a run of tokens of which
    the model was sure. A row is an ordinary example with the probability `plain`, and if it has no unit. Otherwise
    placeholders stand from a random token of a unit to the one before the unit's last, at most `length` of them.

    Batches have a third array, `bool[B, T + 1]`: True for tokens of which the model was sure (`sure_tokens`).

    Attributes:
        mask: id of the placeholder, such as the padding token.
        length: number of placeholders.
    """

    def spans(self, key: Array, batch: tuple[Array, ...]) -> tuple[Array, Array]:
        _, learned, sure = batch
        unit = learned & sure
        # a placeholder in a token's place predicts the next token of the unit
        free = (unit & jnp.pad(unit[:, 1:], ((0, 0), (0, 1)))).at[:, 0].set(False)
        start = jnp.where(free, jax.random.uniform(key, free.shape), -1.0).argmax(1)
        place = jnp.arange(free.shape[1])
        after = lax.cummin(jnp.where(free, free.shape[1], place), axis=1, reverse=True)     # the next one outside
        end = jnp.take_along_axis(after, start[:, None], 1)[:, 0]
        return start, jnp.minimum(end, start + self.length)

    def ordinary(self, drawn: Array, start: Array, end: Array) -> Array:
        return drawn | (start == end)


@partial(jax.jit, static_argnames=("network",))
def _probabilities(network: Any, params: Tree, tokens: Array) -> Array:
    return jnp.exp(-token_losses(network, params, tokens))


def sure_tokens(lm: Any, rows: ExampleRows, threshold: float, size: int = 8) -> np.ndarray:
    """Returns the tokens that a model predicts with a probability above the threshold after the true ones before them,
    `bool[N, T + 1]`; False for the first.

    Args:
        lm: a result of `decodax.load`.
        rows: `N` examples.
        threshold: the probability.
        size: number of rows of a forward pass.

    Raises:
        ValueError: a threshold that is no probability.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold: got {threshold}, takes a probability below 1")
    sure = np.zeros(rows.tokens.shape, bool)
    for at in range(0, len(rows), size):
        some = rows.tokens[at:at + size]
        found = np.asarray(_probabilities(lm.model, lm.params, jnp.asarray(np.resize(some, (size, some.shape[1])))))
        sure[at:at + size, 1:] = found[:len(some)] > threshold
    return sure


__all__ = ["LexicalUnitLoss", "sure_tokens"]
