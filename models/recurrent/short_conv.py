"""The gated short convolution (LFM2; Liquid AI, 2025), in place of a layer's attention:

    y_t = c_t * sum over i of w_i (b * x)_{t - i}        out = W y

where `b`, `c` and `x` are projections of the layer's input, and `*` multiplies channel by channel. There is no state
beside the inputs of the convolution at the last few tokens. A node of a draft stores its own input, and its output is
computed from those of its ancestors.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.layers import STD, Linear, weight
from decodax.models.recurrent.options import ShortConv
from decodax.models.recurrent.walks import ConvWalk


class ShortConvBlock(nnx.Module):
    """The gated short convolution, with the call of `Attention`."""

    def __init__(self, c: DecoderConfig, rule: ShortConv, rngs: nnx.Rngs):
        self.rule, axis, size = rule, "conv_channels", rule.channels
        self.b, self.c, self.x = (Linear(rngs, (c.width, size), ("embed", axis), rule.bias) for _ in range(3))
        self.conv_taps = weight(rngs, (rule.conv, 1, size), (None, None, axis))
        self.conv_bias = nnx.Param(jnp.zeros(size), axes=(axis,)) if rule.bias else None
        self.out = Linear(rngs, (size, c.width), (axis, "embed"), rule.bias, STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        walk = ConvWalk(self.rule, (self.b(x) * self.x(x),), self._convolved)
        y, entry = attend(index, None, None, None, walk=walk)
        return self.out(self.c(x) * y), entry

    def _convolved(self, before: list[tuple[Array, ...]]) -> Array:
        """Returns the outputs of the convolution from its inputs, the farthest first."""
        taps = self.conv_taps[...].astype(jnp.float32)[:, 0]
        y = sum((taps[i] * x.astype(jnp.float32) for i, (x,) in enumerate(before)), jnp.zeros((), jnp.float32))
        if self.conv_bias is not None:
            y = y + self.conv_bias[...].astype(jnp.float32)
        return y.astype(before[-1][0].dtype)
