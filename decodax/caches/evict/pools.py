"""Selections by tables and pools: heads whose sizes were measured beforehand, and prompts apart from what follows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.query_scores import WindowAttention
from decodax.caches.evict.scores import TokenScore
from decodax.caches.evict.selection import Budget, Selection, best


@dataclasses.dataclass(frozen=True)
class HeadShares(Selection):
    """Each head keeps a share of the text of its own, which a table says, whatever the budget (LU-KV, as kvpress has
    it).

    Attributes:
        shares: `[L][G]`, from 0 to 1.
        sinks, window: the first and the latest tokens, which stay in any case.
    """

    score: TokenScore
    shares: tuple[tuple[float, ...], ...]
    sinks: int = 4
    window: int = 1

    @property
    def uniform(self) -> bool:
        return False

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """What the largest head keeps."""
        if len(self.shares) != depth:
            raise ValueError(f"shares: got those of {len(self.shares)} layers, the model has {depth}")
        lengths = np.arange(longest + 1)
        return np.minimum(lengths, np.ceil(lengths * max(self.shares[layer])) + 1).astype(np.int32)

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        longest = len(table) - 1
        return sum(min(longest, int(longest * share) + 2) for share in self.shares[layer])

    def choose(self, held: HeldLayer, count: Array) -> Array:
        own = np.asarray(self.shares[held.layer], np.float32)
        if own.shape != (held.keys.shape[0],):
            raise ValueError(f"shares: got those of {len(own)} heads for layer {held.layer}, the model has "
                             f"{held.keys.shape[0]}")
        ideal = own * held.length.astype(jnp.float32)
        whole = jnp.floor(ideal)
        left = jnp.round(ideal.sum()) - whole.sum()       # to the heads with the largest remainders
        rank = jnp.argsort(jnp.argsort(whole - ideal, stable=True), stable=True)
        number = jnp.clip(whole + (rank < left), 1, held.length).astype(jnp.int32)
        worth = self.score(held)
        protect = (held.index < self.sinks) | (held.index >= (held.count - self.window)[:, None])
        return best(jnp.where(protect, jnp.inf, worth), held.valid, number)


@dataclasses.dataclass(frozen=True)
class HeadSizes(Selection):
    """Each head keeps a number of tokens of its own, which was measured beforehand (HeadKV: "Not All Heads Matter: A
    Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning", Fu et al., 2024).

    Attributes:
        sizes: `[L][G]` tokens, those of the window among them.
    """

    score: WindowAttention
    sizes: tuple[tuple[int, ...], ...]

    @property
    def uniform(self) -> bool:
        return False

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """What the largest head keeps."""
        if len(self.sizes) != depth:
            raise ValueError(f"heads: got those of {len(self.sizes)} layers, the model has {depth}")
        return np.minimum(np.arange(longest + 1), max(self.sizes[layer])).astype(np.int32)

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        return sum(min(len(table) - 1, size) for size in self.sizes[layer])

    def choose(self, held: HeldLayer, count: Array) -> Array:
        own = self.sizes[held.layer]
        if len(own) != held.keys.shape[0]:
            raise ValueError(f"heads: got {len(own)} for layer {held.layer}, the model has {held.keys.shape[0]}")
        return best(self.score(held), held.valid, jnp.asarray(own, jnp.int32))


def head_sizes(heads: tuple[tuple[float, ...], ...], budget: int, window: int, beta: float,
               temperature: float) -> tuple[tuple[int, ...], ...]:
    """How many tokens each head keeps by its importance, as HeadKV shares `budget` tokens a head: `budget - window`
    less its `beta`-th part is every head's, and what is left is shared by `importance ** temperature`."""
    worth = np.asarray(heads, np.float64) ** temperature
    beyond = budget - window
    pool = int(beyond // beta)
    return tuple(tuple(int(n) for n in row) for row in
                 np.round(worth / worth.sum() * pool * worth.size + beyond - pool).astype(int) + window)


@dataclasses.dataclass(frozen=True)
class DecodePool(Selection):
    """What was kept of the prompt stays for good, and the tokens behind it have a pool of their own: the latest
    `recent`, and of the older ones those that the newest query attends to ("SCOPE: Optimizing Key-Value Cache
    Compression in Long-context Generation", Wu et al., 2024).

    Attributes:
        score: of the prompt's tokens. heavy, recent: tokens of the pool.
        grows: "at once": the pool is as large as it may be from the start; "by steps": it has room for `recent`, and
            for one more with each `delta` tokens, up to `heavy`.
    """

    score: WindowAttention
    heavy: int = 768
    recent: int = 256
    grows: Literal["at once", "by steps"] = "at once"
    delta: int = 15

    def __post_init__(self) -> None:
        for name in ("heavy", "recent", "delta"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) + self.heavy + self.recent

    def choose(self, held: HeldLayer, count: Array) -> Array:
        later = held.positions >= held.settled_at
        paid = held.attention()[:, :, -1].mean(1)
        worth = jnp.where(held.index >= (held.count - self.recent)[:, None], jnp.inf, paid)
        new = held.length - held.settled_at
        grown: Array | int = self.heavy if self.grows == "at once" else jnp.minimum((new - 1) // self.delta, self.heavy)
        pool = held.valid & later & best(jnp.where(later, worth, -1), held.valid, jnp.asarray(self.recent + grown))
        prompt = best(self.score(held), held.valid, count)
        return jnp.where(new > 0, pool | (held.valid & ~later), prompt)
