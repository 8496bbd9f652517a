"""MuMo's head: predicts a unit of one language, such as a word, which is several tokens of a multilingual target
("A Simple Framework to Accelerate Multilingual Language Model for Monolingual Text Generation", Hong, Lee and Cho,
2024; later versions: "Accelerating Multilingual Language Model for Excessively Tokenized Languages").

The target does not change. The head reads the hidden state from which the target predicts its next token, and has a
vocabulary of units. The tokens of each unit are data of the drafter (`TrainedDrafter.ids`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from decodax.models.drafters.head import Depth, Weights
from decodax.models.drafters.stack import IndependentHeads
from decodax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class UnitHead(IndependentHeads):
    """A head that predicts a whole unit, a frequent sequence of tokens, at once: a feed-forward layer and a vocabulary
    matrix `H` of units, `H (f + V silu(U f + b) + c)`. Activation and residual connection are our choice.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of units.
        width: width `D` of the target.
        heads: number of tokens of the longest unit after its first, the largest number of drafts.
        inner: units of the hidden layer.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(kw_only=True)
    inner: int = dataclasses.field(kw_only=True)

    @property
    def own_head(self) -> bool:
        """True: its vocabulary is that of the units."""
        return True

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        module.up = Linear(rngs, (self.width, self.inner), ("embed", None), True)
        module.down = Linear(rngs, (self.inner, self.width), (None, "embed"), True, 0.0)
        module.head = Linear(rngs, (self.width, self.vocab), ("embed", "vocab"), False)
        return module

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        n = self.network(weights)
        return n.head(hidden + n.down(jax.nn.silu(n.up(hidden)))).astype(jax.numpy.float32)


def frequent_units(words: Iterable[tuple[int, ...]], count: int, longest: int) -> np.ndarray:
    """Returns the most frequent words of a text as units, `i32[U, L]`, padded with -1.

    >>> frequent_units([(5, 6), (7,), (5, 6), (8, 9, 4), (1, 2, 3, 4)], 9, 3).tolist()
    [[5, 6, -1], [8, 9, 4]]

    Args:
        words: the words, as tokens of the target. Those of one token, or of more than `longest`, are left out.
        count: largest number of units.
        longest: largest number of tokens of a unit.
    """
    often = Counter(word for word in words if 2 <= len(word) <= longest)
    kept = [word for word, _ in often.most_common(count)]
    if not kept:
        raise ValueError(f"words: got none of 2 to {longest} tokens, so there are no units to predict")
    table = np.full((len(kept), max(map(len, kept))), -1, np.int32)
    for row, word in zip(table, kept, strict=True):
        row[:len(word)] = word
    return table


__all__ = ["UnitHead", "frequent_units"]
