"""Groups of tokens that have a pooled key, stored with their last token (DeepSeek V4), and the choice of groups whose
tokens a query attends to (GLM-5.3 Flash; Z.ai, 2026)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.pallas_kernels.window_attention.selection import CachedKeys, ChosenKeys, KeyChoice, TopKeys, added_by


def ends(positions: Array, every: int) -> Array:
    """Returns True for positions at which a group of `every` tokens ends."""
    return (positions >= 0) & ((positions + 1) % every == 0)


def grouped(cached: CachedKeys, every: int, first: int, width: int) -> CachedKeys | None:
    """Returns the groups in a cache as a cache with a slot for each; None if the cache has no room for a group. In the
    result `held` has numbers of groups.

    Args:
        cached: the cached keys.
        every: number of tokens of a group.
        first, width: the key of a group is these entries of that of its last token.
    """
    m, (B, G, page, D), table, held = every, cached.cache.shape, cached.table, cached.held
    count = cached.slots // m
    if not count:
        return None
    if table is None:
        # A view: the last token of a group has the last channels of its slot.
        view, start = cached.cache[:, :, :count * m].reshape(B, G, count, m * D), (m - 1) * D + first
    else:
        last = jnp.arange(count, dtype=jnp.int32) * m + m - 1
        pages = jnp.maximum(table, 0)[:, last // page]
        view, start = cached.cache[pages, :1, last % page, first:].swapaxes(1, 2), 0
    if held is not None:
        held = held[:, :, m - 1:count * m:m]
        held = jnp.where(held >= 0, held // m, -1)
    return CachedKeys(view, jnp.minimum(cached.length // m, count), held, None, None, (start, width))


@dataclasses.dataclass(frozen=True)
class TopGroups(KeyChoice):
    """Chooses for each query the groups of tokens whose pooled keys have the highest index scores, among those that end
    at or before its position. The query attends to all tokens of these, and to the tokens after the last group's end,
    which are not yet a whole group.

    A group is `every` tokens whose last position plus one is a multiple of that, and its pooled key is an entry of the
    key of its last token. So in a tree a node chooses among the groups of its own path.

    Attributes:
        index: chooses among the pooled keys.
        first: index of the first entry of a key that belongs to the pooled one, which is the same for all heads.
        every: number of tokens of a group.
    """

    index: TopKeys
    first: int
    every: int

    def choose(self, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None) -> ChosenKeys:
        m, width = self.every, self.index.queries.shape[-1]
        groups = None if cached is None else grouped(cached, m, self.first, width)
        # All heads of a token have the same pooled key.
        own = k[:, :1, :, self.first:self.first + width]
        near, far = self.index.best(own, mask & ends(where, m)[:, None], groups)
        group, begun = where // m, ((positions + 1) // m)[:, :, None]

        def of(numbers: Array) -> Array:
            """Returns which of the groups `i32[B or 1, C]` a query attends to, `bool[B, W, C]`: the one that is not yet
            whole, and those that it chooses among the groups that end in the window."""
            same = (group[:, :, None] == numbers[:, None]).astype(jnp.float32)
            return (jnp.einsum("bwe,bec->bwc", near.astype(jnp.float32), same) > 0) | (numbers[:, None] == begun)

        kept = (mask & of(group))[:, None]
        if cached is None:
            return ChosenKeys(kept)
        # A group that ends in the window may begin in the cache.
        chosen = of(jnp.arange(far.shape[-1] + 1)[None]) | jnp.pad(far, ((0, 0), (0, 0), (0, 1)))
        wanted = jnp.repeat(chosen.any((0, 1)), m)[:cached.slots]
        return ChosenKeys(kept, added_by(chosen, m), wanted)
