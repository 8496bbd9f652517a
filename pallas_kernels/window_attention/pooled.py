"""Attention to the latest tokens and to pooled keys of groups of tokens (DeepSeek V4)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from decodax.pallas_kernels.window_attention.selection import CachedKeys, ChosenKeys, TopKeys

NearPart = tuple[Array, Array, int | None]
"""Keys `f[B, K, 1, d]` of a window, the mask of the queries that see them, and the sliding window."""


class FarPart(NamedTuple):
    """Keys in a cache, the sliding window of the queries that see them, and which of them are chosen; None: all."""

    keys: CachedKeys
    sliding: int | None = None
    chosen: ChosenKeys | None = None


@dataclasses.dataclass(frozen=True)
class PooledKeys:
    """Says how keys `[k, p, i]` are attended to: a query to the own keys `k` of the latest tokens, and to the pooled
    keys `p` of groups that end at or before its position. A group is `every` tokens whose last position plus one is a
    multiple of that, and its keys are those of its last token. It takes the place of a bias, for caches in which slots
    are positions. It exists only inside a trace.

    Attributes:
        width: number of channels `d` of `k` and of `p`.
        every: number of tokens of a group.
        sliding: a query attends to the own keys of this number of latest positions; None: of all.
        index: chooses among the pooled keys by the index keys `i`; None: all.
    """

    width: int
    every: int
    sliding: int | None = None
    index: TopKeys | None = None

    def ends(self, positions: Array) -> Array:
        """Returns True for positions at which a group ends."""
        return (positions >= 0) & ((positions + 1) % self.every == 0)

    def groups(self, cached: CachedKeys) -> CachedKeys | None:
        """Returns the groups in a cache as a cache with a slot for each, whose key is the pooled one; None if the cache
        has no room for a group. In the result `held` has numbers of groups."""
        m, (B, G, page, D), table, held = self.every, cached.cache.shape, cached.table, cached.held
        count = cached.slots // m
        if not count:
            return None
        if table is None:
            # A view: the last token of a group has the last channels of its slot.
            view, start = cached.cache[:, :, :count * m].reshape(B, G, count, m * D), (m - 1) * D + self.width
        else:
            last = jnp.arange(count, dtype=jnp.int32) * m + m - 1
            pages = jnp.maximum(table, 0)[:, last // page]
            view, start = cached.cache[pages, :, last % page, self.width:].swapaxes(1, 2), 0
        if held is not None:
            held = held[:, :, m - 1:count * m:m]
            held = jnp.where(held >= 0, held // m, -1)
        return CachedKeys(view, jnp.minimum(cached.length // m, count), held, None, None, (start, self.width))

    def parts(self, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None
              ) -> tuple[list[NearPart], list[FarPart]]:
        """Returns the disjoint sets of keys that queries attend to, in the window and in the cache.

        Args:
            k: `f[B, K, 1, D]`, keys of the window.
            mask, positions, where, cached: see `KeyChoice.choose`.
        """
        d, pooled, chosen = self.width, k[..., self.width:], None
        groups = None if cached is None else self.groups(cached)
        seen = mask & self.ends(where)[:, None]
        if self.index is not None:
            index = pooled[..., d:].swapaxes(1, 2)
            held = None if groups is None or groups.part is None else groups._replace(
                part=(groups.part[0] + d, index.shape[-1]))
            chosen = self.index.choose(index, seen, positions, where, held)
            seen = chosen.mask[:, 0]
        near: list[NearPart] = [(k[..., :d], mask, self.sliding), (pooled[..., :d], seen, None)]
        far = [] if cached is None else [FarPart(cached._replace(part=(0, d)), self.sliding)]
        return near, far if groups is None else [*far, FarPart(groups, chosen=chosen)]
