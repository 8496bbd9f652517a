"""CapKV: keeps the tokens whose values add most to the information in the cache, as in kvpress (arXiv 2604.25975)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.expected_attention import FutureQueries
from decodax.caches.evict.scores import HeldLayer, unit
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.caches.rotation import mean_turn
from decodax.common.options import Count, Positive, Whole
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class Capacity(FutureQueries):
    """Scores a token by `w v^T A^-1 v` with its value `v`, its weight `w` and `A = I + sum w v v^T`: the leverage of
    the value, weighted by the direction of the key.

    The weight is `exp(tau * cosine)` with the cosine of the key and the mean query, divided by the maximum in the head.

    Attributes:
        tau: sharpness of the weights.
        epsilon: added to the weights in `A`.
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
          tau: Positive = 5.0) -> Eviction:
    """Keeps the tokens with the largest leverage of their values, weighted by the cosine of key and mean query.

    The options are those of kvpress.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        n_sink: number of first tokens that are always kept.
        n_future_positions: number of next positions over which the rotation of queries is averaged.
        tau: sharpness of the weights.
    """
    return Eviction(Top(Capacity(n_sink, n_future_positions, tau)), budget, every, name="capkv")
