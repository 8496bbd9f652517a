"""The selection of LU-KV, as in kvpress: each head keeps a share of the text, from a table. It is not in the registry,
since the table is measured on each model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Selection, best
from decodax.common.options import Whole


@dataclasses.dataclass(frozen=True)
class HeadShares(Selection):
    """Keeps the best tokens of each head; their number is a fixed share of the text, and the budget is ignored.

    Attributes:
        score: score of the tokens.
        shares: `[L][G]`, the share of each head, from 0 to 1.
        sinks, window: numbers of first and of latest tokens that are always kept.
    """

    score: TokenScore
    shares: tuple[tuple[float, ...], ...]
    sinks: Whole = 4
    window: Whole = 1

    uniform = False

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """Returns an upper bound on the number of tokens that a head of the layer keeps, for each text of 0 to
        `longest` tokens, `i32[longest + 1]`. It follows from the largest share; `budget` is not used."""
        lengths = np.arange(longest + 1)
        return np.minimum(lengths, np.ceil(lengths * max(self.shares[layer])) + 1).astype(np.int32)

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        longest = len(table) - 1
        return sum(min(longest, int(longest * share) + 2) for share in self.shares[layer])

    def check(self, shapes: Sequence[KVLayer]) -> None:
        super().check(shapes)
        if len(self.shares) != len(shapes):
            raise ValueError(f"shares: got those of {len(self.shares)} layers, the model has {len(shapes)}")
        for layer, (own, shape) in enumerate(zip(self.shares, shapes, strict=True)):
            if len(own) != shape.heads:
                raise ValueError(f"shares: got those of {len(own)} heads for layer {layer}, the model has "
                                 f"{shape.heads}")

    def choose(self, held: HeldLayer, count: Array) -> Array:
        own = np.asarray(self.shares[held.layer], np.float32)
        ideal = own * held.length.astype(jnp.float32)
        whole = jnp.floor(ideal)
        left = jnp.round(ideal.sum()) - whole.sum()       # to the heads with the largest remainders
        rank = jnp.argsort(jnp.argsort(whole - ideal, stable=True), stable=True)
        number = jnp.clip(whole + (rank < left), 1, held.length).astype(jnp.int32)
        worth = self.score(held)
        protect = (held.index < self.sinks) | (held.index >= (held.count - self.window)[:, None])
        return best(jnp.where(protect, jnp.inf, worth), held.valid, number)
