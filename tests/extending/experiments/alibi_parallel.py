"""A model family: ALiBi (Press et al. 2022) in place of positions, and blocks whose attention and MLP read the same
input (GPT-J)."""

import dataclasses

import jax
import jax.numpy as jnp

import decodax as dx
from decodax.cache import KVLayer, dense
from decodax.core.types import CacheKind, no_inputs
from decodax.pallas_kernels.window_attention import by_position


@dataclasses.dataclass(frozen=True)
class AlibiParallel(dx.Model):
    vocab: int
    width: int = 16
    heads: int = 4
    layers: int = 2
    cache: CacheKind = dense

    @property
    def cache_kind(self):
        return self.cache

    def with_cache(self, kind):
        return dataclasses.replace(self, cache=kind)

    def init_params(self, key):
        D = self.width
        shapes = {"embed": (self.vocab, D), "qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
        rows = [{name: jax.random.normal(jax.random.fold_in(k, i), shape) * D ** -0.5
                 for i, (name, shape) in enumerate(shapes.items())} for k in jax.random.split(key, self.layers)]
        return {"embed": rows[0]["embed"] * 8, "layers": rows}

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        no_inputs(self, inputs)
        layer = KVLayer(self.heads, self.width // self.heads, queries=self.heads, bias=True)
        return self.cache([layer] * self.layers, batch, capacity, jnp.float32)

    def fall(self, at, keys_at):
        """What ALiBi adds to the scores, a slope for each head: the farther back a key, the less."""
        slopes = 2.0 ** (-8 * (1 + jnp.arange(self.heads)) / self.heads)
        return slopes[:, None, None] * (keys_at - at)

    def apply(self, params, window, cache):
        x, entries = params["embed"][window.tokens], []
        for layer, p in enumerate(params["layers"]):
            y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            q, k, v = jnp.split((y @ p["qkv"]).reshape(*y.shape[:2], 3 * self.heads, -1), 3, 2)
            seen, entry = cache.attend(layer, q, k, v, window, scale=q.shape[-1] ** -0.5, bias=by_position(self.fall))
            x = x + seen.reshape(y.shape) @ p["out"] + jax.nn.gelu(y @ p["up"]) @ p["down"]
            entries.append(entry)
        return dx.Out(hidden=x, entries=entries, head=lambda h: h @ params["embed"].T / self.width)
