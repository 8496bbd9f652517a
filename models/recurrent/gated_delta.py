"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024), in place of a layer's attention: Qwen3-Next, Qwen3.5, OLMo
Hybrid. And Kimi Delta Attention (Kimi Team, 2025), in which each channel of a key has a decay of its own: Kimi Linear,
Ling 3, GLM-5.3 Flash.

Queries, keys and values go through a short causal convolution and SiLU; queries and keys are then divided by their
length. For each head with a state `S`,

    S <- exp(g) S        S <- S + k (b (v - S^T k))^T        y = S^T q / sqrt(N)        out = W (RMS(y) silu(z))

with a decay `g = -A softplus(a + dt)` and a rate `b`, the sigmoid of a projection; `a`, `b` and the gate `z` are
projections of the layer's input. Several heads of values share the queries and keys of one head. In Kimi Delta
Attention `a` has an entry for each channel of a key, `a` and `z` may be products with two matrices, and the gate is the
sigmoid of `z`. In Ling 3 and GLM-5.3 Flash the decay has a lower bound, `g = floor sigmoid(A (a + dt))`.

A state has `N P` numbers, and a node of a draft the `N + P` of its key and of the value that it writes. Windows, chains
and trees, are computed by matrix products and one triangular system, and prompts in chunks of them: see
`decodax.cache.recurrence`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import STD, Linear, Norm, weight
from decodax.models.recurrent.options import GatedDelta
from decodax.models.recurrent.walks import LinearWalk, Terms


class DeltaBlock(nnx.Module):
    """The gated delta rule, with the call of `Attention`."""

    def __init__(self, c: DecoderConfig, rule: GatedDelta, rngs: nnx.Rngs):
        self.rule, axis = rule, "delta_heads"
        keys, heads, values = rule.key_heads * rule.key_dim, rule.value_heads, rule.value_heads * rule.value_dim
        into = lambda out: Linear(rngs, (c.width, out), ("embed", axis), False)
        decays = heads * rule.key_dim if rule.by_channel else heads
        self.in_q, self.in_k, self.in_v, self.in_b = into(keys), into(keys), into(values), into(heads)
        if rule.rank:
            small = lambda: Linear(rngs, (c.width, rule.rank), ("embed", None), False)
            up = lambda out: Linear(rngs, (rule.rank, out), (None, axis), False)
            self.low_a, self.low_z = small(), small()
            self.in_a, self.in_z = up(decays), up(values)
        else:
            self.in_a, self.in_z = into(decays), into(values)
        self.q_taps, self.k_taps, self.v_taps = (weight(rngs, (rule.conv, 1, size), (None, None, axis))
                                                 for size in (keys, keys, values))
        speeds = jnp.log(jnp.linspace(1.0, 16.0, heads))
        self.A_log = nnx.Param(speeds, axes=(axis,))
        self.dt_bias = nnx.Param(jnp.ones(decays), axes=(axis,))
        self.y_norm = Norm(NormConfig(eps=rule.eps), (rule.value_dim,), (None,))
        self.out = Linear(rngs, (values, c.width), (axis, "embed"), False, STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        low_a, low_z = (self.low_a(x), self.low_z(x)) if self.rule.rank else (x, x)
        steps = self.in_a(low_a).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        speed = jnp.exp(self.A_log[...].astype(jnp.float32))
        if self.rule.by_channel:
            steps, speed = steps.reshape(*x.shape[:2], self.rule.value_heads, -1), speed.reshape(-1, 1)
        decay = self.rule.floor * jax.nn.sigmoid(speed * steps) if self.rule.floor else -speed * jax.nn.softplus(steps)
        rate = self.rule.rate * jax.nn.sigmoid(self.in_b(x).astype(jnp.float32))
        # One array whose axis of heads comes first, so that a mesh divides it by heads.
        into = jnp.concatenate([self._split(part(x)) for part in (self.in_q, self.in_k, self.in_v)], -1)
        walk = LinearWalk(self.rule, (into,), lambda before: Terms(*self._convolved(before), decay, rate))
        y, entry = attend(index, None, None, None, walk=walk)
        gate = jax.nn.sigmoid if self.rule.gate == "sigmoid" else jax.nn.silu
        y = self.y_norm(y).astype(x.dtype) * gate(self.in_z(low_z).reshape(y.shape).astype(jnp.float32))
        return self.out(y.astype(x.dtype).reshape(*x.shape[:2], -1)), entry

    def _split(self, y: Array) -> Array:
        """Splits queries, keys, or the values that share them, into the heads of keys."""
        return y.reshape(*y.shape[:2], self.rule.key_heads, -1)

    def _convolved(self, before: list[tuple[Array, ...]]) -> tuple[Array, Array, Array]:
        """Returns queries and keys, `f32[B, W, G, N]`, and values, `f32[B, W, H, P]`, from the inputs of the
        convolution, the farthest first."""
        r, sums = self.rule, [jnp.zeros((), jnp.float32)] * 3
        taps = [part[...].astype(jnp.float32).reshape(r.conv, r.key_heads, -1)
                for part in (self.q_taps, self.k_taps, self.v_taps)]
        for i, (x,) in enumerate(before):
            parts = jnp.split(x.astype(jnp.float32), (r.key_dim, 2 * r.key_dim), -1)
            sums = [total + part * tap[i] for total, part, tap in zip(sums, parts, taps, strict=True)]
        q, k, v = (jax.nn.silu(total.astype(before[-1][0].dtype).astype(jnp.float32)) for total in sums)
        unit = lambda y: y * jax.lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + 1e-6)
        return unit(q) * r.key_dim ** -0.5, unit(k), v.reshape(*v.shape[:2], r.value_heads, r.value_dim)
