"""CapKV: keeps the tokens whose values add most to the capacity of the cache, as kvpress has it (arXiv 2604.25975)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.expected_attention import FutureQueries
from decodax.caches.evict.scores import HeldLayer, unit
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.caches.rotation import mean_turn
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class Capacity(FutureQueries):
    """`w v^T A^-1 v` of a value `v` with `A = I + sum w v v^T`: its leverage, weighted by the direction of its key.

    The weight `w` of a token is `exp(tau * cosine)` of its key and the mean query, relative to the largest one of its
    head.

    Attributes:
        tau: sharpness of the weights. epsilon: added to the weights in `A`.
    """

    tau: float = 5.0
    epsilon: float = 1e-6

    def __call__(self, held: HeldLayer) -> Array:
        number, total = held.gathered.rest
        anchor = mean_turn(held.shape, total / jnp.maximum(number, 1), self.ahead(held))
        G = held.keys.shape[0]
        cosine = jnp.einsum("grd,gsd->grs", unit(anchor).reshape(G, -1, anchor.shape[-1]), unit(held.keys))
        counted = (held.valid & (held.index >= self.n_sink))[:, None]
        weights = jnp.exp(self.tau * (cosine - jnp.where(counted, cosine, -1).max(-1, keepdims=True)))
        weights = jnp.where(counted, weights, 0)
        scaled = jnp.where(counted, weights + self.epsilon, 0)
        matrix = jnp.eye(held.values.shape[-1]) + jnp.einsum("grs,gsi,gsj->grij", scaled, held.values, held.values)
        solved = jnp.linalg.solve(matrix, held.values.swapaxes(1, 2)[:, None])         # [G, r, e, S]
        leverage = jnp.einsum("gsi,gris->grs", held.values, solved)
        return jnp.where(held.index < self.n_sink, jnp.inf, (weights * leverage).mean(1))


@CACHES.register("capkv", "CapKV", "kvpress 2026", family="evict")
def capkv(budget: Budget = 0.5, every: Every = None, n_sink: Whole = 4, n_future_positions: Count = 512,
          tau: float = 5.0) -> Eviction:
    """Keeps the tokens whose values add most to the cached ones, weighted by their keys' direction to the mean query.

    The options are those of kvpress.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        n_sink: number of first tokens, which stay.
        n_future_positions: number of next positions over which the rotation of queries is averaged.
        tau: sharpness of the weights.
    """
    return Eviction(Top(Capacity(n_sink, n_future_positions, tau)), budget, every, name="capkv")
