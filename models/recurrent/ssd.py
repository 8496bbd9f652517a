"""The state-space block of Mamba-2 (Dao and Gu, 2024), as a network's layer (`decodax.models.recurrent.mamba2`) or in
place of a layer's attention in a decoder: Nemotron-H, Granite 4 H, Falcon-H1, Bamba.

The symbols are those of `decodax.models.recurrent.mamba2`. In a decoder the gate may also multiply the outputs after
their norm, or without a norm, and factors may multiply the parts of the first projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.layers import STD, Linear, weight
from decodax.models.recurrent.options import Ssd
from decodax.models.recurrent.walks import LinearWalk, Terms

Change = Callable[[Array], Array]


def same(x: Array) -> Array:
    return x


class SsdBlock(nnx.Module):
    """The state-space block, with the call of `Attention`."""

    def __init__(self, c: DecoderConfig, rule: Ssd, rngs: nnx.Rngs):
        self.rule = rule
        self.into = Linear(rngs, (c.width, rule.inner + rule.channels + rule.heads), ("embed", None), rule.bias)
        self.conv_taps = weight(rngs, (rule.conv, 1, rule.channels), (None, None, None))
        self.conv_bias = nnx.Param(jnp.zeros(rule.channels), axes=(None,)) if rule.conv_bias else None
        self.A_log = nnx.Param(jnp.log(jnp.arange(1.0, rule.heads + 1)), axes=(None,))
        self.dt_bias, self.D = (nnx.Param(jnp.ones(rule.heads), axes=(None,)) for _ in range(2))
        self.y_scale = nnx.Param(jnp.ones(rule.inner), axes=(None,)) if rule.norm is not None else None
        self.out = Linear(rngs, (rule.inner, c.width), (None, "embed"), rule.bias, STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        rule, y = self.rule, self.into(x)
        if rule.factors != (1.0,) * 5:
            y = y * jnp.asarray(np.repeat(rule.factors, rule.widths), y.dtype)
        z, into, dt = jnp.split(y, (rule.inner, rule.inner + rule.channels), -1)
        dt, decay = steps(rule, {"dt_bias": self.dt_bias[...], "A_log": self.A_log[...]}, dt)
        walk = LinearWalk(rule, into, lambda before: self._terms(before, dt, decay))
        y, entry = attend(index, None, None, None, walk=walk)
        y, gate = y.reshape(*x.shape[:2], -1), jax.nn.silu(z.astype(jnp.float32))
        if self.y_scale is None:
            y = y * gate
        elif rule.norm == "gate first":
            y = normed(rule, self.y_scale[...], y * gate)
        else:
            y = normed(rule, self.y_scale[...], y) * gate
        y = self.out(y.astype(x.dtype))
        return y if rule.out_factor == 1.0 else y * rule.out_factor, entry

    def _terms(self, before: list[Array], dt: Array, decay: Array) -> Terms:
        conv = {"taps": self.conv_taps[...], "bias": None if self.conv_bias is None else self.conv_bias[...]}
        u, B, C = convolved(self.rule, {"conv": conv}, jnp.stack(before, 2))
        heads = u.astype(jnp.float32).reshape(*u.shape[:2], self.rule.heads, -1)
        return Terms(C, B, heads * dt[..., None], decay, skip=heads * self.D[...].astype(jnp.float32)[:, None])


def convolved(c: Any, p: dict[str, Any], taps: Array, change: Change = same) -> tuple[Array, Array, Array]:
    """Applies the convolution. Returns `x`, `[B, W, inner]`, and `B` and `C`, `[B, W, G, N]`.

    Args:
        c: the options, `Ssd` or `Mamba2Config`.
        p: the layer's weights.
        taps: `[B, W, conv, channels]`, the inputs of each node's convolution, its own last.
        change: changes the convolution's outputs, see `mixed`.
    """
    y = (taps.astype(jnp.float32) * p["conv"]["taps"][:, 0].astype(jnp.float32)).sum(2)
    y = y + p["conv"]["bias"].astype(jnp.float32) if c.conv_bias else y
    return divided(c, change(jax.nn.silu(y).astype(taps.dtype)))


def divided(c: Any, y: Array) -> tuple[Array, Array, Array]:
    """Splits the convolution's channels into `x`, `B` and `C`."""
    group = lambda a: a.reshape(*a.shape[:2], c.groups, c.state)
    middle = c.inner + c.groups * c.state
    return y[..., :c.inner], group(y[..., c.inner:middle]), group(y[..., middle:])


def steps(c: Any, p: dict[str, Any], dt: Array) -> tuple[Array, Array]:
    """Returns time steps and decays `dt A`, `f32[B, W, H]`."""
    dt = jax.nn.softplus(dt.astype(jnp.float32) + p["dt_bias"].astype(jnp.float32))
    dt = jnp.clip(dt, *c.steps)
    return dt, -jnp.exp(p["A_log"].astype(jnp.float32)) * dt


def gated(c: Any, scale: Array, y: Array, z: Array) -> Array:
    """Returns the gated norm, `f32[B, W, inner]`: multiplies by the gate, then divides each group by its root mean
    square."""
    return normed(c, scale, y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32)))


def normed(c: Any, scale: Array, y: Array) -> Array:
    """Divides each group of channels by its root mean square, and multiplies by the scale: `f32[B, W, inner]`."""
    each = y.reshape(*y.shape[:2], c.groups, -1)
    each = each * jax.lax.rsqrt(jnp.square(each).mean(-1, keepdims=True) + c.eps)
    return each.reshape(y.shape) * scale.astype(jnp.float32)
