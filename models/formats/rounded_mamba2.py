"""A Mamba-2 with 8-bit activations and states, as made by Quamba2 (`decodax.models.formats.quamba2`).

A state is rounded once for each generated token, but not during prefill. Rounding is not linear, so windows process
their nodes one by one. A node's state depends only on its ancestors, so drafts do not change the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Recurrent
from decodax.cache.recurrence import chained
from decodax.common.struct import struct
from decodax.core.cache import Cache
from decodax.core.capabilities import PromptPhase, ReadPrompt, prefill_cache
from decodax.core.types import no_inputs
from decodax.core.window import Window, causal, take
from decodax.models.formats.integers import codes_of
from decodax.models.packed import multiply
from decodax.models.recurrent.mamba2 import Mamba2, Mamba2Config, convolved, projected
from decodax.models.recurrent.ssd import gated, steps
from decodax.models.recurrent.state_space import biased
from decodax.models.transformer import Weights


@struct
class Rounded(Recurrent, PromptPhase):
    """Recurrent states in 8 bits: for each layer a dict of "ring", `i8[B, R, C]`, and "state", `i8[B, H, N, P]`.

    During prefill, states are `f32[B, H, N, P]`. They are rounded after it, so that the result does not depend on the
    chunks.
    """

    def prefill_cache(self) -> Rounded:
        wide = lambda own: {**own, "state": own["state"].astype(jnp.float32)}
        return self.replace(states=tuple(map(wide, self.states)))

    def finish_prefill(self, prompt: ReadPrompt) -> Rounded:
        grids = [prompt.params["layers"][str(i)]["grid"]["state"] for i in range(len(self.states))]
        near = lambda own, grid: {**own, "state": codes_of(own["state"], grid).astype(jnp.int8)}
        return self.replace(states=tuple(map(near, self.states, grids)))


@dataclasses.dataclass(frozen=True)
class QuantizedMamba2(Mamba2):
    """A Mamba-2 with 8-bit activations and states.

    The weights of its layers have an additional dict "grid" of scales: "into" and "conv", `f32[channels]`, before and
    after the convolution, and "state", `f32[H, N, P]`.
    """

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
        c = self.config
        empty = lambda: {"ring": jnp.zeros((batch, c.conv - 1, c.channels), jnp.int8),
                         "state": jnp.zeros((batch, c.heads, c.state, c.head_dim), jnp.int8)}
        return Rounded(states=tuple(empty() for _ in range(c.layers)), length=jnp.zeros(batch, jnp.int32),
                       size=capacity)

    def abstract_params(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        c, shapes = self.config, super().abstract_params(dtype)
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        grid = {"into": shape(c.channels), "conv": shape(c.channels), "state": shape(c.heads, c.state, c.head_dim)}
        return {**shapes, "layers": {i: {**layer, "grid": grid} for i, layer in shapes["layers"].items()}}

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        c, grid = self.config, p["grid"]["conv"]
        z, into, dt = projected(c, p, x)
        near = lambda y: codes_of(y, grid) * grid
        y, entry = scanned(c, p, layer, into, dt, lambda taps: convolved(c, p, taps, near), window, cache)
        y = gated(c, p["gated_norm"], y.reshape(z.shape), z).astype(x.dtype)
        return biased(multiply(y, p["out"]["kernel"]), p["out"]), entry

    def forward(self, params: Weights, tokens: Array) -> Array:
        """Returns logits `f32[B, T, V]` of whole sequences `i32[B, T]`, for training and scoring.

        The sequence is processed like a prompt: activations are rounded to 8 bits, but states are not. The logits
        therefore differ slightly from those of token-by-token decoding.
        """
        window = causal(tokens, jnp.zeros(len(tokens), jnp.int32)).replace(is_prefill=True)
        cache: Any = self.init_cache(len(tokens), 0)
        return self.apply(params, window, prefill_cache(cache)).logits()


def scanned(c: Mamba2Config, p: Weights, layer: int, into: Array, dt: Array,
            convolve: Callable[[Array], tuple[Array, Array, Array]], window: Window, cache: Any) -> tuple[Array, Any]:
    """Computes convolution and recurrence of a layer with rounded states. Returns the output `f32[B, W, H, P]` and the
    layer's entry.

    Args:
        c: the configuration.
        p: the layer's weights.
        layer: index of the layer.
        into: `f[B, W, channels]`, inputs of the convolution, multiples of the scales "into".
        dt: `f[B, W, H]`, time steps before the bias.
        convolve: returns `x`, `B` and `C` from the inputs `[B, W, conv, channels]` of each node's convolution.
        window: the window.
        cache: the cache.
    """
    grid, D = p["grid"], p["D"][:, None]

    def wide(own: dict[str, Array]) -> Array:
        state = own["state"]
        return state * grid["state"] if state.dtype == jnp.int8 else state

    def kept(ring: Array, state: Array, own: dict[str, Array]) -> dict[str, Array]:
        if own["state"].dtype == jnp.int8:
            state = codes_of(state, grid["state"]).astype(jnp.int8)
        return {"ring": codes_of(ring, grid["into"]).astype(jnp.int8), "state": state}

    def inner(taps: Array, dt: Array) -> tuple[Array, ...]:
        u, B, C = convolve(taps)
        return u.reshape(*u.shape[:2], c.heads, c.head_dim), B, C, *steps(c, p, dt)

    def step(own: dict[str, Array], node: tuple[Array, Array]) -> tuple[dict[str, Array], Array]:
        whole = jnp.concatenate([own["ring"] * grid["into"], node[0][:, None]], 1)
        heads, B, C, dt, decay = (a[:, 0] for a in inner(whole[:, None], node[1][:, None]))
        B, C = (jnp.repeat(a, c.heads // c.groups, 1) for a in (B, C))                      # [B, H, N]
        state = wide(own) * jnp.exp(decay)[..., None, None] + B[..., None] * (heads * dt[..., None])[:, :, None]
        # The output is computed before the state is rounded.
        return kept(whole[:, 1:], state, own), jnp.einsum("bhn,bhnp->bhp", C, state) + heads * D

    def along(own: dict[str, Array], nodes: tuple[Array, Array], live: Array) -> tuple[dict[str, Array], Array]:
        order, rank = jnp.argsort(~live, 1, stable=True), jnp.maximum(jnp.cumsum(live, 1) - 1, 0)
        into, dt = (take(a, order) for a in nodes)          # live nodes first
        whole, W = jnp.concatenate([own["ring"] * grid["into"], into], 1), live.shape[1]
        taps = jnp.stack([whole[:, i:i + W] for i in range(c.conv)], 2)
        heads, B, C, dt, decay = inner(taps, dt)
        y, state = chained(wide(own), C, B, heads * dt[..., None], decay, take(live, order), c.chunk)
        ring = take(whole, live.sum(1)[:, None] + jnp.arange(c.conv - 1))
        return kept(ring, state, own), take(y + heads * D, rank)

    return cache.walk(layer, step, (into, dt), window, along)
