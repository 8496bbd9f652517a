"""Attention to the latest tokens and to pooled keys of groups of tokens (DeepSeek V4)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax import Array

from decodax.pallas_kernels.window_attention.groups import ends, grouped
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

    def parts(self, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None
              ) -> tuple[list[NearPart], list[FarPart]]:
        """Returns the disjoint sets of keys that queries attend to, in the window and in the cache.

        Args:
            k: `f[B, K, 1, D]`, keys of the window.
            mask, positions, where, cached: see `KeyChoice.choose`.
        """
        d, pooled, chosen = self.width, k[..., self.width:], None
        groups = None if cached is None else grouped(cached, self.every, d, d)
        seen = mask & ends(where, self.every)[:, None]
        if self.index is not None:
            index = pooled[..., d:].swapaxes(1, 2)
            held = None if groups is None or groups.part is None else groups._replace(
                part=(groups.part[0] + d, index.shape[-1]))
            chosen = self.index.choose(index, seen, positions, where, held)
            seen = chosen.mask[:, 0]
        near: list[NearPart] = [(k[..., :d], mask, self.sliding), (pooled[..., :d], seen, None)]
        far = [] if cached is None else [FarPart(cached._replace(part=(0, d)), self.sliding)]
        return near, far if groups is None else [*far, FarPart(groups, chosen=chosen)]
