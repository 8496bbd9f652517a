"""A model small enough for statistics: the next token depends on the last two through a random table.

It is also the shortest example of the `Model` protocol: it keeps what it attends to in a real cache, so the laws of
commit, clip and selection bite here as they do on a transformer.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from decodax.cache import Cache, Window, dense
from decodax.core.types import Out


@dataclasses.dataclass(frozen=True)
class Toy:
    """Attends uniformly to everything visible; logits come from the newest token and the mean of what it sees."""

    vocabulary: int = 16
    width: int = 8
    spread: float = 2.0

    def init_params(self, seed: int = 0) -> dict:
        e, q, h, p = jax.random.split(jax.random.key(seed), 4)
        normal = jax.random.normal
        return dict(embed=normal(e, (self.vocabulary, self.width)), mix=normal(q, (self.width, self.width)),
                    place=normal(p, (64, self.width)) * 0.3,
                    head=normal(h, (self.width, self.vocabulary)) * self.spread / self.width**0.5)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        return dense([(1, self.width)], batch, capacity, jnp.float32)

    def apply(self, params: dict, window: Window, cache: Cache) -> Out:
        x = params["embed"][window.tokens] + params["place"][window.positions % 64]
        k = x[:, :, None]
        seen = cache.attend(0, k, k, k, window, scale=0.3)[:, :, 0]
        hidden = jnp.tanh(x + seen @ params["mix"])
        return Out(hidden=hidden, kv=((k, k),), head=lambda h: h @ params["head"])
