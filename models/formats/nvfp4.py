"""NVFP4, the 4-bit floats of NVIDIA's Blackwell (2024), with a scale for 16 inputs.

Codes are those of MXFP4. The scale of 16 consecutive inputs of an output is a float of 8 bits (E4M3), and one float of
32 bits multiplies all of a tensor. That makes 4.5 bits a weight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.models.formats.format import Format
from decodax.models.formats.mxfp4 import Mxfp4Blocks, rounded

GROUP = 16
"""Number of inputs that share a scale."""

LARGEST, LARGEST_SCALE, SMALLEST_SCALE = 6.0, 448.0, 2.0 ** -9
"""The largest code; the largest and the smallest positive scale."""


@struct
class Nvfp4Blocks(Mxfp4Blocks):
    """A kernel in NVFP4.

    Attributes:
        codes: `u8[..., N, 8, G]`, two codes a byte as in `Mxfp4Blocks`.
        scales: `f8_e4m3fn[..., N, G]`.
        factor: `f32[..., N, 1]`, multiplies all weights of an output.
    """

    factor: Array | None = None

    def _factor(self, shared: Array, steps: Array | None) -> Array:
        assert self.factor is not None
        # Times 2 ** 14, which the decoded codes lack.
        return shared.astype(jnp.float32) * (self.factor * 2.0 ** 14)


@dataclasses.dataclass(frozen=True)
class Nvfp4(Format):
    """4-bit floats (E2M1), with an 8-bit float for each group of 16 inputs, determined by its largest weight, and a
    factor for each kernel, determined by the largest of all."""

    def pack(self, kernel: Array, seen: Any = None) -> Nvfp4Blocks:
        w = jnp.swapaxes(kernel, -1, -2).astype(jnp.float32)
        if w.shape[-1] % GROUP:
            raise ValueError(f"kernel: got {w.shape[-1]} inputs, nvfp4 takes a multiple of {GROUP}")
        groups = w.reshape(*w.shape[:-1], -1, GROUP)
        largest = jnp.abs(groups).max(-1)
        factor = largest.max((-2, -1), keepdims=True) / (LARGEST * LARGEST_SCALE)
        factor = jnp.where(factor == 0, 1.0, factor)
        scales = jnp.clip(largest / (LARGEST * factor), SMALLEST_SCALE, LARGEST_SCALE).astype(jnp.float8_e4m3fn)
        rest = groups / (scales.astype(jnp.float32) * factor)[..., None]
        return Nvfp4Blocks(codes=rounded(rest), scales=scales,
                           factor=jnp.broadcast_to(factor, (*w.shape[:-1], 1)))
