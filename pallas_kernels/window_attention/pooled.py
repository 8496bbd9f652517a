"""Attention to the latest tokens and to pooled keys of groups of tokens (DeepSeek V4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from decodax.pallas_kernels.window_attention.selection import TopKeys

Cached = tuple[Array, Array, Array | None, Array | None]
"""A cache, the number of its slots to read, the positions in visible slots and the table of pages, as
`reference.cache_attention` takes them."""

NearPart = tuple[Array, Array, int | None]
"""Keys `f[B, K, 1, d]` of a window, the mask of the queries that see them, and the sliding window."""

FarPart = tuple[Cached, tuple[int, int], int | None, Callable[[Array, Array], Array] | None]
"""A cache, the first channel and the number of channels of its keys, the sliding window, and what is added to scores,
from keys and their positions."""


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

    def groups(self, cache: Array, length: Array, held: Array | None, table: Array | None) -> tuple[Cached, int] | None:
        """Returns the groups in a cache as a cache with a slot for each, and the channel at which a slot's pooled key
        begins; None if the cache has no room for a group. For the arguments see `reference.cache_attention`; in the
        result `held` has numbers of groups."""
        m, (B, G, page, D) = self.every, cache.shape
        count = page * (1 if table is None else table.shape[1]) // m
        if not count:
            return None
        if table is None:
            # A view: the last token of a group has the last channels of its slot.
            view, start = cache[:, :, :count * m].reshape(B, G, count, m * D), (m - 1) * D + self.width
        else:
            last = jnp.arange(count, dtype=jnp.int32) * m + m - 1
            pages = jnp.maximum(table, 0)[:, last // page]
            view, start = cache[pages, :, last % page, self.width:].swapaxes(1, 2), 0
        if held is not None:
            held = held[:, :, m - 1:count * m:m]
            held = jnp.where(held >= 0, held // m, -1)
        return (view, jnp.minimum(length // m, count), held, None), start

    def parts(self, k: Array, mask: Array, where: Array, cached: Cached | None) -> tuple[list[NearPart], list[FarPart]]:
        """Returns the disjoint sets of keys that queries attend to, in the window and in the cache.

        Args:
            k: `f[B, K, 1, D]`, keys of the window.
            mask: `bool[B or 1, W, K]`, the nodes that each query sees.
            where: `i32[B, K]`, positions of the window's keys.
            cached: the cache; None: there is none.
        """
        d, pooled = self.width, k[..., self.width:]
        groups = None if cached is None else self.groups(*cached)
        seen, far = mask & self.ends(where)[:, None], None
        if self.index is not None:
            index = pooled[..., d:].swapaxes(1, 2)
            held, part = (None, None) if groups is None else (groups[0], (groups[1] + d, index.shape[-1]))
            seen, far = self.index.choose(index, seen, held, part)
        near: list[NearPart] = [(k[..., :d], mask, self.sliding), (pooled[..., :d], seen, None)]
        apart: list[FarPart] = [] if cached is None else [(cached, (0, d), self.sliding, None)]
        if groups is not None:
            apart.append((groups[0], (groups[1], d), None, far))
        return near, apart
