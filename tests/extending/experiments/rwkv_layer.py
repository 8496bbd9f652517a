"""A model of recurrent layers in the manner of RWKV-4 (Peng et al. 2023): a token shift, and an average of values that
fades by channel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import decodax as dx
from decodax.cache import Recurrent
from decodax.core.types import no_inputs


def step(p, S, x):
    """One token. The average is kept as numerator and denominator, both divided by `exp(top)`."""
    r, k, v = jnp.moveaxis(x["now"] + S["shift"], 1, 0)                       # f[B, D] each
    add = lambda top, k: (jnp.maximum(top, k), jnp.exp(top - jnp.maximum(top, k)), jnp.exp(k - jnp.maximum(top, k)))
    _, old, new = add(S["top"], k + p["bonus"])
    out = jax.nn.sigmoid(r) * (old * S["num"] + new * v) / (old * S["den"] + new)
    top, old, new = add(S["top"] - jnp.exp(p["fade"]), k)
    return dict(shift=x["next"], num=old * S["num"] + new * v, den=old * S["den"] + new, top=top), out


@dataclasses.dataclass(frozen=True)
class Rwkv(dx.Model):
    vocab: int
    width: int = 16
    layers: int = 2

    def init_params(self, key):
        D = self.width
        shapes = {"embed": (self.vocab, D), "mix": (3, D), "rkv": (3, D, D), "fade": (D,), "bonus": (D,), "out": (D, D)}
        rows = [{name: jax.random.normal(jax.random.fold_in(k, i), shape) * D ** -0.5 * 2
                 for i, (name, shape) in enumerate(shapes.items())} for k in jax.random.split(key, self.layers)]
        return {"embed": rows[0]["embed"] * 2, "layers": rows}

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        no_inputs(self, inputs)
        zeros = lambda *shape: jnp.zeros((batch, *shape, self.width))
        empty = dict(shift=zeros(3), num=zeros(), den=zeros(), top=zeros() - 1e30)
        return Recurrent(states=(empty,) * self.layers, length=jnp.zeros(batch, jnp.int32), size=capacity)

    def apply(self, params, window, cache):
        x, entries = params["embed"][window.tokens], []
        for layer, p in enumerate(params["layers"]):
            y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            mix = jax.nn.sigmoid(p["mix"])
            given = dict(now=jnp.einsum("bwd,id,ide->bwie", y, mix, p["rkv"]),
                         next=jnp.einsum("bwd,id,ide->bwie", y, 1 - mix, p["rkv"]))
            read, entry = cache.walk(layer, functools.partial(step, p), given, window)
            x = x + read @ p["out"]
            entries.append(entry)
        return dx.Out(hidden=x, entries=entries, head=lambda h: h @ params["embed"].T)
