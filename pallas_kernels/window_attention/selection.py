"""Attention to the best keys of each query, which a cheap score chooses (the lightning indexer of DeepSeek V3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from decodax.pallas_kernels.window_attention import reference
from decodax.pallas_kernels.window_attention.reference import MASKED, AttentionBlock


@dataclasses.dataclass(frozen=True)
class TopKeys:
    """Chooses the keys that a query attends to: the `count` ones with the highest index scores `sum_i weights[i] *
    max(0, queries[i] @ key)` among those that it sees. It takes the place of a bias, for caches in which slots are
    positions. It exists only inside a trace.

    Attributes:
        queries: `f[B, W, N, d]`, index queries of the window's nodes, on the entries of keys.
        weights: `f32[B, W, N]`, their weights.
        count: number of keys that a query attends to.
    """

    queries: Array
    weights: Array
    count: int

    def choose(self, k: Array, mask: Array, cached: tuple[Array, Array, Array | None, Array | None] | None,
               part: tuple[int, int] | None = None) -> tuple[Array, Callable[[Array, Array], Array] | None]:
        """Chooses among the window's keys and the cached ones together.

        Args:
            k: `f[B, 1, K, d]`, keys of the window.
            mask: `bool[B or 1, W, K]`, the keys that each query sees.
            cached: the cache, the number of its slots to read, the positions in visible slots and the table of pages,
                as `reference.cache_attention` takes them; None: there is no cache.
            part: see `reference.cache_attention`; the index keys.

        Returns:
            The mask of the chosen keys of the window, and a function from cached keys and their positions `i32[B or 1,
            1, S]` to what is added to their scores, `f32[B, 1, W, S]`.
        """
        B, W, N, _ = self.queries.shape
        queries = self.queries.swapaxes(1, 2).reshape(B, 1, N * W, -1)
        near = self._weighed(jnp.einsum("bgqd,bgkd->bgqk", queries, k, preferred_element_type=jnp.float32))
        found = [jnp.where(mask, near, -jnp.inf)]
        if cached is not None:
            found = [self._far(queries, *cached, part), *found]
        scores = jnp.concatenate(found, -1)
        S = scores.shape[-1] - near.shape[-1]
        if scores.shape[-1] > self.count:
            best = lax.top_k(scores, self.count)[1]
            rows = jnp.arange(B)[:, None, None], jnp.arange(W)[None, :, None]
            keep = jnp.zeros(scores.shape, bool).at[(*rows, best)].set(True)
        else:
            keep = jnp.ones(scores.shape, bool)

        def far(_: Array, where: Array) -> Array:
            at = jnp.broadcast_to(jnp.maximum(where, 0), (B, W, where.shape[2]))
            return jnp.where(jnp.take_along_axis(keep[..., :S], at, 2), 0.0, MASKED)[:, None]

        return mask & keep[..., S:], far if S else None

    def _weighed(self, products: Array) -> Array:
        """Returns index scores `f32[B, W, K]` from products of index queries and keys, `f32[B, 1, N W, K]`."""
        B, W, N = self.weights.shape
        each = jnp.maximum(products, 0).reshape(B, N, W, -1)
        return jnp.einsum("biwk,bwi->bwk", each, self.weights)

    def _far(self, queries: Array, cache: Array, length: Array, held: Array | None, table: Array | None,
             part: tuple[int, int] | None) -> Array:
        """Returns the index scores of cached keys, `f32[B, W, S]`; minus infinity for keys that are not visible."""
        B, W, _ = self.weights.shape

        def visit(x: AttentionBlock, scores: Array) -> Array:
            seen = jnp.broadcast_to(x.seen[:, 0, :1], (B, 1, x.scores.shape[-1]))
            own = jnp.where(seen, self._weighed(x.scores), -jnp.inf)
            return lax.dynamic_update_slice_in_dim(scores, own, x.at, 2)

        return reference.by_block(visit, lambda slots: jnp.full((B, W, slots), -jnp.inf), queries, cache, length, held,
                                  table, part)
