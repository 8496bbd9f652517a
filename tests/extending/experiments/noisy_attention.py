"""An evicting cache after Keyformer (Adnan et al. 2024) and VATP (Guo et al. 2024): the attention that the latest
queries pay under Gumbel noise, times the norm of the value. The first `sinks` tokens always stay."""

import dataclasses

import jax
import jax.numpy as jnp

import decodax as dx
from decodax.caches import TokenScore
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Budget, Every, Top


@dataclasses.dataclass(frozen=True)
class NoisyAttention(TokenScore):
    """Noise is drawn by position, so a token has the same one at each eviction and in every batch."""

    latest: int = 8
    tau: float = 1.5
    sinks: int = 2
    seed: int = 0

    @property
    def always(self):
        return self.sinks

    def __call__(self, held):
        noise = jax.vmap(lambda at: jax.random.gumbel(jax.random.fold_in(jax.random.key(self.seed), at)))
        noisy = jnp.log(held.attention()) + jax.vmap(noise)(held.positions)[:, None, None]         # f32[G, r, w, S]
        weights = jax.nn.softmax(noisy / self.tau, axis=-1)
        paid = jnp.where(held.asked_at[:, None] >= 0, weights, 0).sum((1, 2))
        return jnp.where(held.positions < self.sinks, jnp.inf, paid * jnp.linalg.norm(held.values, axis=-1))


@dx.caches.register("noisy-attention", "An experiment", "decodax", family="evict")
def noisy_attention(budget: Budget = 64, every: Every = None, latest: int = 8, tau: float = 1.5) -> Eviction:
    """Keeps the tokens to which the latest queries pay the most attention under noise, weighted by their values.

    Args:
        budget: tokens that each head keeps. every: tokens between evictions while decoding.
        latest: queries that are looked at. tau: temperature of the noisy softmax.
    """
    return Eviction(Top(NoisyAttention(latest, tau)), budget, every, name="noisy-attention")
