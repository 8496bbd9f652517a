"""The local convolution of DFlash2 (Z Lab, 2026): short causal convolutions along a block, before and after each half
of a layer, whose kernels depend on the token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class LocalConvolution:
    """Shape of the convolutions.

    Attributes:
        taps: number of slots that a convolution reads, its own and those before it.
        group: number of channels that share the part of the kernel that depends on the token.
    """

    taps: int = 2
    group: int = 16


class Convolutions(nnx.Module):
    """The two causal convolutions around one half (attention or MLP) of a decoder layer: one over its input, one over
    its output, each within a block of `block` slots. With initial weights they change nothing."""

    def __init__(self, c: LocalConvolution, width: int, block: int, rngs: nnx.Rngs):
        if width % c.group:
            raise ValueError(f"group: got {c.group}, takes a divisor of the width, {width}")
        self.c, self.block = c, block
        self.base = nnx.Param(jnp.zeros((2, c.taps, width)).at[:, 0].set(1.0), axes=(None, None, "embed"))
        self.kernels = Linear(rngs, (width, 2 * c.taps * (width // c.group)), ("embed", None), False, 0.0)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Returns the input of the half, `f[B, S, d]`, convolved, and the kernels `f[B, S, taps, groups]` for
        `after`."""
        kernels = self.kernels(x).reshape(*x.shape[:2], 2, self.c.taps, -1)
        return self._convolved(x, kernels[:, :, 0], 0), kernels[:, :, 1]

    def after(self, x: Array, kernels: Array) -> Array:
        """Convolves the output `x` of the half, `f[B, S, d]`, with the `kernels` that the call on its input returned.
        """
        return self._convolved(x, kernels, 1)

    def _convolved(self, x: Array, kernels: Array, side: int) -> Array:
        block = min(self.block, x.shape[1])
        base, blocks = self.base[...][side].astype(x.dtype), x.reshape(-1, block, x.shape[-1])
        out = jnp.zeros_like(x)
        for tap in range(min(self.c.taps, block)):
            before = jnp.pad(blocks, ((0, 0), (tap, 0), (0, 0)))[:, :block].reshape(x.shape)
            out = out + before * (base[tap] + jnp.repeat(kernels[:, :, tap], self.c.group, -1))
        return out


__all__ = ["Convolutions", "LocalConvolution"]
