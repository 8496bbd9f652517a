"""A model small enough for statistics: the next token depends on the last two through a random table.

It is also the shortest example of a `Model`: it keeps what it attends to in a real cache, so the laws of
commit, clip and selection bite here as they do on a transformer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from decodax.cache import dense
from decodax.core.cache import Cache
from decodax.core.types import Model, Out, no_inputs
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class Toy(Model):
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

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
        return dense([(1, self.width)], batch, capacity, jnp.float32)

    def apply(self, params: dict, window: Window, cache: Cache) -> Out:
        x = params["embed"][window.tokens] + params["place"][window.positions % 64]
        k = x[:, :, None]
        seen, entry = cache.attend(0, k, k, k, window, scale=0.3)
        hidden = jnp.tanh(x + seen[:, :, 0] @ params["mix"])
        return Out(hidden=hidden, entries=(entry,), head=lambda h: h @ params["head"])
