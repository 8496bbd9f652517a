"""The selective scan of Mamba's first version (Gu and Dao, 2023), as a network's layer
(`decodax.models.recurrent.mamba`) or in place of a layer's attention in a decoder: Jamba (Lieber et al., 2024), with
norms of `dt`, `B` and `C`.

The symbols are those of `decodax.models.recurrent.mamba`. Nodes are computed one after the other, and the cache keeps
the state after each node of a window (`decodax.cache.Recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import STD, Linear, Norm, weight
from decodax.models.recurrent.options import SelectiveScan
from decodax.models.recurrent.walks import StepWalk

State = dict[str, Array]
"""`ring`, `f[B, K - 1, C]`, and `state`, `f32[B, C, N]`."""


def empty(conv: int, inner: int, states: int, batch: int, dtype: jax.typing.DTypeLike) -> State:
    """Returns the state of `batch` rows before the first token, zeros: the last inputs of the convolution, "ring",
    `[batch, conv - 1, inner]` in `dtype`, and the state of the recurrence, "state", `f32[batch, inner, states]`."""
    return {"ring": jnp.zeros((batch, conv - 1, inner), dtype), "state": jnp.zeros((batch, inner, states), jnp.float32)}


def selective_step(own: State, node: Array, taps: Array, bias: Array | float,
                   projected: Callable[[Array], tuple[Array, Array, Array]], A: Array, D: Array
                   ) -> tuple[State, Array]:
    """Computes one token of Mamba's selective scan, for `B` rows with `C` channels of `N` states each and a convolution
    over `K` tokens.

    Args:
        own: the state before it.
        node: `f[B, C]`, the input of the convolution.
        taps: `f32[K, C]`, weights of the convolution.
        bias: its bias, `f32[C]`, or 0.
        projected: returns time steps before their softplus, `f[B, C]`, `B` and `C`, `f[B, N]`, from the outputs of the
            convolution.
        A: `f32[C, N]`.
        D: `f32[C]`.

    Returns:
        The state after it, and the output `f32[B, C]` before the gate.
    """
    wide = lambda a: a.astype(jnp.float32)
    whole = jnp.concatenate([own["ring"], node[:, None]], 1)                                # [B, K, C]
    u = jax.nn.silu((wide(whole) * taps).sum(1) + bias).astype(node.dtype)
    dt, B, C = projected(u)
    dt = jax.nn.softplus(wide(dt))
    state = own["state"] * jnp.exp(dt[..., None] * A) + (dt * wide(u))[..., None] * wide(B)[:, None]
    return {"ring": whole[:, 1:], "state": state}, (state * wide(C)[:, None]).sum(-1) + D * wide(u)


class SelectiveScanBlock(nnx.Module):
    """The selective scan, with the call of `Attention`."""

    def __init__(self, c: DecoderConfig, rule: SelectiveScan, rngs: nnx.Rngs):
        self.rule, axis = rule, "scan_channels"
        self.in_x, self.in_z = (Linear(rngs, (c.width, rule.inner), ("embed", axis), rule.bias) for _ in range(2))
        self.conv_taps = weight(rngs, (rule.conv, 1, rule.inner), (None, None, axis))
        self.conv_bias = nnx.Param(jnp.zeros(rule.inner), axes=(axis,)) if rule.conv_bias else None
        self.low = Linear(rngs, (rule.inner, rule.rank + 2 * rule.state), (axis, None), False)
        self.dt = Linear(rngs, (rule.rank, rule.inner), (None, axis), True)
        self.A_log = nnx.Param(jnp.log(jnp.broadcast_to(jnp.arange(1.0, rule.state + 1), (rule.inner, rule.state))),
                               axes=(axis, None))
        self.D = nnx.Param(jnp.ones(rule.inner), axes=(axis,))
        norm = lambda size: None if rule.eps is None else Norm(NormConfig(eps=rule.eps), (size,), (None,))
        self.dt_norm, self.b_norm, self.c_norm = norm(rule.rank), norm(rule.state), norm(rule.state)
        self.out = Linear(rngs, (rule.inner, c.width), (axis, "embed"), rule.bias, STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        rule, wide = self.rule, lambda a: a.astype(jnp.float32)
        node, z = self.in_x(x), self.in_z(x)
        A, D, taps = -jnp.exp(wide(self.A_log[...])), wide(self.D[...]), wide(self.conv_taps[...])[:, 0]
        bias = 0.0 if self.conv_bias is None else wide(self.conv_bias[...])
        walk = StepWalk(lambda own, node: selective_step(own, node, taps, bias, self._projected, A, D), node,
                        empty(rule.conv, rule.inner, rule.state, x.shape[0], x.dtype))
        y, entry = attend(index, None, None, None, walk=walk)
        return self.out((y * jax.nn.silu(wide(z))).astype(x.dtype)), entry

    def _projected(self, u: Array) -> tuple[Array, Array, Array]:
        low, B, C = jnp.split(self.low(u), (self.rule.rank, self.rule.rank + self.rule.state), -1)
        if self.dt_norm is not None and self.b_norm is not None and self.c_norm is not None:
            low, B, C = self.dt_norm(low), self.b_norm(B), self.c_norm(C)
        return self.dt(low), B, C
