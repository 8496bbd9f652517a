"""The recurrent block of Griffin and RecurrentGemma (De et al., 2024), in place of a layer's attention.

The stream goes through two projections. One is passed through an activation. The other goes through a short causal
convolution and the real-gated linear recurrent unit (RG-LRU), a recurrence of each channel:

    a_t = exp(-8 softplus(d) sigmoid(W_a u_t))        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(W_i u_t) u_t

with `h` and `a` zero before the text, and no square root at its first position. Their product is projected back. The
state is `h` and the latest inputs of the convolution, so a node of a draft has a few numbers for each channel, and the
cache keeps the state after each node of a window (`decodax.cache.Recurrent`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.layers import ACTIVATIONS, STD, Linear, weight
from decodax.models.recurrent.options import RgLru
from decodax.models.recurrent.walks import StepWalk

State = dict[str, Array]
"""`ring`, `f[B, K - 1, blocks, C / blocks]`, and `state`, `h`, `f32[B, blocks, C / blocks]`."""


def empty(rule: RgLru, batch: int, dtype: jax.typing.DTypeLike) -> State:
    """Returns the state of `batch` rows before the first token, zeros: the last inputs of the convolution, "ring", and
    the float32 state of the recurrence, "state", in the blocks of the gates' matrices."""
    size = rule.width // rule.blocks
    return {"ring": jnp.zeros((batch, rule.conv - 1, rule.blocks, size), dtype),
            "state": jnp.zeros((batch, rule.blocks, size), jnp.float32)}


class RecurrentBlock(nnx.Module):
    """The recurrent block, with the call of `Attention`."""

    def __init__(self, c: DecoderConfig, rule: RgLru, rngs: nnx.Rngs):
        self.rule, self.activation, size, axis = rule, c.activation, rule.width // rule.blocks, "rg_blocks"
        self.x, self.y = (Linear(rngs, (c.width, rule.width), ("embed", axis), True) for _ in range(2))
        self.out = Linear(rngs, (rule.width, c.width), (axis, "embed"), True, STD / (2 * len(c.layers)) ** 0.5)
        self.taps = weight(rngs, (rule.width, 1, rule.conv), (axis, None, None))
        self.conv_bias, self.decay = (nnx.Param(jnp.zeros(rule.width), axes=(axis,)) for _ in range(2))
        self.input_gate, self.decay_gate = (weight(rngs, (rule.blocks, size, size), (axis, None, None))
                                            for _ in range(2))
        self.input_bias, self.decay_bias = (nnx.Param(jnp.zeros((rule.blocks, size)), axes=(axis, None))
                                            for _ in range(2))

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        y = ACTIVATIONS[self.activation](self.y(x))
        blocks = self.x(x).reshape(*x.shape[:2], self.rule.blocks, -1)     # so that a mesh divides the states by them
        walk = StepWalk(self._step, (blocks, tables[None] == 0), empty(self.rule, x.shape[0], x.dtype), self._along)
        h, entry = attend(index, None, None, None, walk=walk)
        return self.out(h.astype(x.dtype).reshape(y.shape) * y), entry

    def _terms(self, before: list[Array], first: Array) -> tuple[Array, Array]:
        """Returns the decay and the addition to the state of nodes, `f32[..., blocks, C / blocks]`, from the inputs of
        the convolution, the farthest first, and whether they are the first of their text."""
        wide = lambda part: part[...].astype(jnp.float32)
        blocks = lambda part: wide(part).reshape(self.rule.blocks, -1, *part.shape[1:])
        taps = blocks(self.taps)[:, :, 0]
        u = sum((taps[..., i] * part.astype(jnp.float32) for i, part in enumerate(before)), blocks(self.conv_bias))
        u = u.astype(before[-1].dtype).astype(jnp.float32)
        gate = lambda kernel, bias: jax.nn.sigmoid(jnp.einsum("...hi,hij->...hj", u, wide(kernel)) + wide(bias))
        decay = -8.0 * gate(self.decay_gate, self.decay_bias) * jax.nn.softplus(blocks(self.decay))
        first = first[..., None, None]
        scale = jnp.where(first, 1.0, jnp.sqrt(jnp.maximum(-jnp.expm1(2 * decay), 0)))
        return jnp.where(first, 0.0, jnp.exp(decay)), u * gate(self.input_gate, self.input_bias) * scale

    def _step(self, state: State, node: Any) -> tuple[State, Array]:
        x, first = node
        whole = jnp.concatenate([state["ring"], x[:, None]], 1)
        decay, added = self._terms(list(whole.swapaxes(0, 1)), first)
        h = decay * state["state"] + added
        return {"ring": whole[:, 1:], "state": h}, h

    def _along(self, state: State, nodes: Any, live: Array) -> tuple[State, Array]:
        # Live nodes come first, so that each follows the one before it in the text.
        order = jnp.argsort(~live, axis=1, stable=True)
        put = lambda a, at: jnp.take_along_axis(a, at.reshape(*at.shape, *[1] * (a.ndim - 2)), 1)
        x, first, on = put(nodes[0], order), put(nodes[1], order), put(live, order)
        W, K = live.shape[1], self.rule.conv
        whole = jnp.concatenate([state["ring"], x], 1)
        decay, added = self._terms([whole[:, i:i + W] for i in range(K)], first)
        on = on[..., None, None]
        decay, added = jnp.where(on, decay, 1.0), jnp.where(on, added, 0.0)
        join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        total, h = jax.lax.associative_scan(join, (decay, added), axis=1)
        h = h + total * state["state"][:, None]
        count = live.sum(1)[:, None]
        ring = put(whole, count + jnp.arange(K - 1)) if K > 1 else state["ring"]
        return {"ring": ring.astype(state["ring"].dtype), "state": h[:, -1]}, put(h, jnp.argsort(order, axis=1))
