"""Attention to the best keys of each query, which a cheap score chooses: single keys (the lightning indexer of DeepSeek
V3.2) or blocks of them (MiniMax M3)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from decodax.pallas_kernels.window_attention import reference
from decodax.pallas_kernels.window_attention.reference import MASKED, AttentionBlock


class CachedKeys(NamedTuple):
    """A cache in which the slot of a token is its position, as `reference.cache_attention` takes it: its arrays, the
    number of slots to read in each row, the positions in visible slots, the scales, the table of pages, and the
    channels of a slot that are its key."""

    cache: Array
    length: Array
    held: Array | None
    scales: Array | None
    table: Array | None
    part: tuple[int, int] | None = None

    @property
    def slots(self) -> int:
        """Number of slots `S` of a row."""
        return self.cache.shape[2] * (1 if self.table is None else self.table.shape[1])


class ChosenKeys(NamedTuple):
    """The keys that a choice has left.

    Attributes:
        mask: `bool[B or 1, n, W, K]`, those of the window, where `n` divides the number of query heads.
        added: a function from cached keys and their positions `i32[B or 1, 1, S]` to what is added to their scores,
            `f32[B, n, W, S]`; None: there is no cache.
        wanted: `bool[S]`, the slots of which some query has chosen the key; None: there is no cache.
    """

    mask: Array
    added: Callable[[Array, Array], Array] | None = None
    wanted: Array | None = None


class KeyChoice(abc.ABC):
    """A choice of the keys that a query attends to. It takes the place of a bias, for caches in which slots are
    positions. It exists only inside a trace."""

    @abc.abstractmethod
    def choose(self, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None) -> ChosenKeys:
        """Chooses among the window's keys and the cached ones together.

        Args:
            k: `f[B, G, K, d]`, keys of the window.
            mask: `bool[B or 1, W, K]`, the keys of the window that each query sees.
            positions: `i32[B, W]`, positions of the queries.
            where: `i32[B, K]`, positions of the window's keys.
            cached: the cached keys; None: there are none.
        """


@dataclasses.dataclass(frozen=True)
class TopKeys(KeyChoice):
    """Chooses for each query the `count` keys with the highest index scores `sum_i weights[i] * max(0, queries[i] @
    key)` among those that it sees. All heads attend to the same keys.

    Attributes:
        queries: `f[B, W, N, d]`, index queries of the window's nodes, on the entries of keys.
        weights: `f32[B, W, N]`, their weights.
        count: number of keys that a query attends to.
    """

    queries: Array
    weights: Array
    count: int

    def choose(self, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None) -> ChosenKeys:
        near, far = self.best(k, mask, cached)
        own = near[:, None]
        return ChosenKeys(own, added_by(far), far.any((0, 1))) if far.shape[-1] else ChosenKeys(own)

    def best(self, k: Array, mask: Array, cached: CachedKeys | None) -> tuple[Array, Array]:
        """Returns the keys that each query chooses among those that it sees: of the window `bool[B, W, K]`, and cached
        ones `bool[B, W, S]`, without a cache `bool[B, W, 0]`. For the arguments see `KeyChoice.choose`."""
        B, W, N, _ = self.queries.shape
        queries = self.queries.swapaxes(1, 2).reshape(B, 1, N * W, -1)
        near = self._weighed(jnp.einsum("bgqd,bgkd->bgqk", queries, k, preferred_element_type=jnp.float32))
        found = [jnp.where(mask, near, -jnp.inf)]
        if cached is not None:
            found = [self._far(queries, cached), *found]
        scores = jnp.concatenate(found, -1)
        S = scores.shape[-1] - near.shape[-1]
        keep = _best(scores, self.count) & (scores > -jnp.inf)
        return keep[..., S:], keep[..., :S]

    def _weighed(self, products: Array) -> Array:
        """Returns index scores `f32[B, W, K]` from products of index queries and keys, `f32[B, 1, N W, K]`."""
        B, W, N = self.weights.shape
        each = jnp.maximum(products, 0).reshape(B, N, W, -1)
        return jnp.einsum("biwk,bwi->bwk", each, self.weights)

    def _far(self, queries: Array, cached: CachedKeys) -> Array:
        """Returns the index scores of cached keys, `f32[B, W, S]`; minus infinity for keys that are not visible."""
        B, W, _ = self.weights.shape

        def visit(x: AttentionBlock, scores: Array) -> Array:
            seen = jnp.broadcast_to(x.seen[:, 0, :1], (B, 1, x.scores.shape[-1]))
            own = jnp.where(seen, self._weighed(x.scores), -jnp.inf)
            return lax.dynamic_update_slice_in_dim(scores, own, x.at, 2)

        return reference.by_block(visit, lambda slots: jnp.full((B, W, slots), -jnp.inf), queries, *cached)


@dataclasses.dataclass(frozen=True)
class TopBlocks(KeyChoice):
    """Chooses for each query the `count` blocks of `size` positions whose best key has the highest index score `query @
    key` among the keys that it sees, and attends to all of these in the chosen blocks. The block of the query and those
    just before it are chosen in any case, `local` blocks in all.

    Each of `N` index heads chooses for the `H / N` query heads of its own. Blocks are counted in positions, so the
    choice is the same wherever a window begins, and in a tree a node chooses among the blocks of its own path.

    Attributes:
        queries: `f[B, W, N, e]`, index queries of the window's nodes; `N` is a multiple of the number of key heads.
            None: they are given separately, as `_attention_once` needs them.
        first: index of the first of the `e` entries of a key that are its index key, which is that of all heads. The
            first head's is read: on a mesh each device reads that of its own first head.
        count: number of blocks that a query attends to, at least `local`.
        size: number of positions of a block.
        local: number of blocks that are chosen in any case.
    """

    queries: Array | None
    first: int
    count: int
    size: int
    local: int

    def choose(self, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None) -> ChosenKeys:
        assert self.queries is not None
        B, W, N, d = self.queries.shape
        K, size = k.shape[2], self.size
        queries = self.queries.swapaxes(1, 2).reshape(B, 1, N * W, d)
        near = jnp.einsum("bqd,bkd->bqk", queries[:, 0], k[:, 0, :, self.first:self.first + d],
                          preferred_element_type=jnp.float32).reshape(B, N, W, K)
        near = jnp.where(mask[:, None], near, -jnp.inf)
        far = jnp.zeros((B, N, W, 0)) if cached is None else reference.block_maxima(
            queries, *cached[:5], size=size, first=self.first).reshape(B, N, W, -1)
        C = far.shape[-1]
        # A column for each block of the cache, and further ones for blocks of the window beyond these: any positions
        # may be in a window without a cache.
        rank, blocks = _ranked(where // size)
        column = jnp.where((blocks >= 0) & (blocks < C), blocks, C + jnp.arange(K))
        scores = jnp.concatenate([far, jnp.full((B, N, W, K), -jnp.inf)], -1)

        def put(i: Array, scores: Array) -> Array:
            best = jnp.where((rank == i)[:, None, None], near, -jnp.inf).max(-1, keepdims=True)
            here = jnp.arange(C + K) == lax.dynamic_slice_in_dim(column, i, 1, 1)
            return jnp.where(here[:, None, None], jnp.maximum(scores, best), scores)

        scores = lax.fori_loop(0, rank.max() + 1, put, scores)
        numbers = jnp.concatenate([jnp.broadcast_to(jnp.arange(C), (B, C)), blocks], 1)
        before = (positions // size)[:, None, :, None] - numbers[:, None, None]
        some = scores > -jnp.inf
        keep = _best(jnp.where(some & (before >= 0) & (before < self.local), jnp.inf, scores), self.count) & some

        def chosen(columns: Array) -> Array:
            """Returns which keys are chosen, `bool[B, N, W, K]`, by the columns of their blocks, `i32[B or 1, K]`."""
            at = jnp.broadcast_to(columns[:, None, None], (B, N, W, columns.shape[1]))
            return jnp.take_along_axis(keep, at, 3)

        kept = mask[:, None] & chosen(jnp.take_along_axis(column, rank, 1))
        if cached is None:
            return ChosenKeys(kept)
        wanted = jnp.repeat(keep[..., :C].any((0, 1, 2)), size)[:cached.slots]
        return ChosenKeys(kept, lambda _, at: jnp.where(chosen(jnp.maximum(at[:, 0], 0) // size), 0.0, MASKED), wanted)


def added_by(chosen: Array, size: int = 1) -> Callable[[Array, Array], Array]:
    """Returns what a choice adds to the scores of cached keys, as `ChosenKeys.added`; `chosen`, `bool[B, W, C]`, says
    which blocks of `size` positions are chosen."""
    B, W, _ = chosen.shape

    def added(_: Array, at: Array) -> Array:
        at = jnp.broadcast_to(jnp.maximum(at, 0) // size, (B, W, at.shape[2]))
        return jnp.where(jnp.take_along_axis(chosen, at, 2), 0.0, MASKED)[:, None]

    return added


def _ranked(blocks: Array) -> tuple[Array, Array]:
    """Returns for each of `K` numbers the rank of its value among the different values of the row, from 0 on, and these
    values in order with -1 after them: `i32[B, K]` both."""
    B, K = blocks.shape
    order = jnp.argsort(blocks, 1)
    ordered = jnp.take_along_axis(blocks, order, 1)
    new = jnp.concatenate([jnp.zeros((B, 1), bool), ordered[:, 1:] != ordered[:, :-1]], 1)
    rank, rows = jnp.cumsum(new, 1, dtype=jnp.int32), jnp.arange(B)[:, None]
    return (jnp.zeros((B, K), jnp.int32).at[rows, order].set(rank),
            jnp.full((B, K), -1, jnp.int32).at[rows, rank].set(ordered))


def _best(scores: Array, count: int) -> Array:
    """Returns True for the `count` highest scores along the last axis; of equal ones the first count."""
    if scores.shape[-1] <= count:
        return jnp.ones(scores.shape, bool)
    best = lax.top_k(scores, count)[1]
    rows = [jnp.arange(n).reshape(-1, *[1] * (scores.ndim - 1 - i)) for i, n in enumerate(scores.shape[:-1])]
    return jnp.zeros(scores.shape, bool).at[(*rows, best)].set(True)
