"""The state-space block of Mamba-2 (Dao and Gu, 2024), as a network's layer (`decodax.models.recurrent.mamba2`) or in
place of a layer's attention in a decoder: Nemotron-H, Granite 4 H, Falcon-H1, Bamba.

The symbols are those of `decodax.models.recurrent.mamba2`. In a decoder the gate may also multiply the outputs after
their norm, or without a norm, and factors may multiply the parts of the first projection.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.layers import STD, Linear, weight
from decodax.models.recurrent.options import Ssd, SsdShape
from decodax.models.recurrent.walks import LinearWalk, Terms


class SsdBlock(nnx.Module):
    """The state-space block of Mamba-2 as a module of a decoder layer, called like `Attention`."""

    def __init__(self, c: DecoderConfig, rule: Ssd, rngs: nnx.Rngs):
        self.rule, axis, grouped, states = rule, "ssm_heads", "ssm_groups", rule.groups * rule.state
        into = lambda size, axis: Linear(rngs, (c.width, size), ("embed", axis), rule.bias)
        self.in_z, self.in_x = into(rule.inner, axis), into(rule.inner, axis)
        self.in_b, self.in_c = into(states, grouped), into(states, grouped)
        self.in_dt = into(rule.heads, axis)
        # Small, and in the order of the file: not divided.
        self.conv_taps = weight(rngs, (rule.conv, 1, rule.channels), (None, None, None))
        self.conv_bias = nnx.Param(jnp.zeros(rule.channels), axes=(None,)) if rule.conv_bias else None
        self.A_log = nnx.Param(jnp.log(jnp.arange(1.0, rule.heads + 1)), axes=(axis,))
        self.dt_bias, self.D = (nnx.Param(jnp.ones(rule.heads), axes=(axis,)) for _ in range(2))
        self.y_scale = nnx.Param(jnp.ones(rule.inner), axes=(axis,)) if rule.norm is not None else None
        self.out = Linear(rngs, (rule.inner, c.width), (axis, "embed"), rule.bias, STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        rule, linears = self.rule, (self.in_z, self.in_x, self.in_b, self.in_c, self.in_dt)
        z, u, B, C, dt = (linear(x) if factor == 1.0 else linear(x) * factor
                          for linear, factor in zip(linears, rule.factors, strict=True))
        dt, decay = steps(rule, {"dt_bias": self.dt_bias[...], "A_log": self.A_log[...]}, dt)
        # With an axis of heads or groups, so that a mesh divides the cache by them.
        into = tuple(part.reshape(*x.shape[:2], parts, -1)
                     for part, parts in ((u, rule.heads), (B, rule.groups), (C, rule.groups)))
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

    def _terms(self, before: list[tuple[Array, ...]], dt: Array, decay: Array) -> Terms:
        at, bias = (self.rule.inner, self.rule.inner + self.rule.groups * self.rule.state), self.conv_bias
        taps = jnp.split(self.conv_taps[...][:, 0], at, -1)
        biases = [None] * 3 if bias is None else jnp.split(bias[...], at)
        parts = (jnp.stack(part, 2) for part in zip(*before, strict=True))
        heads, B, C = (convolve(part, own.reshape(-1, *part.shape[3:]),
                                 None if bias is None else bias.reshape(part.shape[3:]))
                       for part, own, bias in zip(parts, taps, biases, strict=True))
        heads = heads.astype(jnp.float32)
        return Terms(C, B, heads * dt[..., None], decay, skip=heads * self.D[...].astype(jnp.float32)[:, None])


def convolve(inputs: Array, taps: Array, bias: Array | None) -> Array:
    """Applies the convolution and SiLU: `f[B, W, ...]` from the inputs of each node's convolution, its own last, `f[B,
    W, K, ...]`, with weights `f[K, ...]` and a bias `f[...]` or None."""
    y = (inputs.astype(jnp.float32) * taps.astype(jnp.float32)).sum(2)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(inputs.dtype)


def steps(c: SsdShape, p: dict[str, Any], dt: Array) -> tuple[Array, Array]:
    """Returns the time steps, `f32[B, W, H]`: the softplus of `dt` plus a bias, clipped to `c.steps`; and the
    logarithms of decays, time step times `A` (negative), `f32[B, W, H]`. `p` has the weights "dt_bias" and "A_log"."""
    dt = jax.nn.softplus(dt.astype(jnp.float32) + p["dt_bias"].astype(jnp.float32))
    dt = jnp.clip(dt, *c.steps)
    return dt, -jnp.exp(p["A_log"].astype(jnp.float32)) * dt


def gated(c: SsdShape, scale: Array, y: Array, z: Array) -> Array:
    """Returns `y`, `[B, W, inner]`, times the SiLU of the gate `z`, then normalized in groups of channels as by
    `normed`: `f32[B, W, inner]`."""
    return normed(c, scale, y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32)))


def normed(c: SsdShape, scale: Array, y: Array) -> Array:
    """Returns the RMS norm of `y`, `[B, W, inner]`, over each of `c.groups` groups of channels, times `scale`,
    `[inner]`: `f32[B, W, inner]`."""
    each = y.reshape(*y.shape[:2], c.groups, -1)
    each = each * jax.lax.rsqrt(jnp.square(each).mean(-1, keepdims=True) + c.eps)
    return each.reshape(y.shape) * scale.astype(jnp.float32)
