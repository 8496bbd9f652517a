"""MXFP4, the 4-bit floats of the Open Compute Project's microscaling formats (version 1.0, 2023), in which GPT-OSS is
released.

32 consecutive inputs of an output share a scale, a power of two stored as its exponent in 8 bits (E8M0). A code has a
sign, two bits of an exponent and one of a mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4 or 6. That makes 4.25 bits a weight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import struct
from decodax.models.formats.format import Format
from decodax.models.formats.ggml.blocks import GgmlBlocks
from decodax.models.packed import Packed

GROUP = 32
"""Number of inputs that share a scale."""

LARGEST = 2
"""Exponent of the largest code, 6."""

BIAS = 127
"""An exponent `s` of a scale is stored as `s + BIAS`."""


@struct
class Mxfp4Blocks(GgmlBlocks):
    """A kernel in MXFP4.

    Attributes:
        codes: `u8[..., N, 16, G]`, byte `j` of a group with the codes of its inputs `2 j` in the low and `2 j + 1` in
            the high bits, as in released files.
        scales: `u8[..., N, G]`, the exponents of the scales.
    """

    def values(self, dtype: Any) -> Array:
        pairs = jnp.stack(self._weights(), -1)                  # [..., N, 16, G, 2]
        return jnp.swapaxes(pairs, -3, -2).reshape(self.shape).astype(dtype)

    def here(self) -> Packed:       # type: ignore[override]
        """Returns the kernel itself: XLA decodes it within a product on accelerators, too."""
        return self

    def _rows(self, x: Array) -> Array:
        pairs = x.reshape(len(x), -1, self.group // 2, 2)
        return pairs.transpose(0, 3, 2, 1).reshape(len(x), self.group, -1)

    def _code(self, j: int) -> Array:
        half = self.group // 2
        both = self.codes[..., j % half, :]
        return _decoded(both >> 4 if j >= half else both)

    def _weights(self) -> list[Array]:
        scales = self._factor(self.scales, None)[..., None, :]
        return [_decoded(codes) * scales for codes in (self.codes, self.codes >> 4)]

    def _factor(self, shared: Array, steps: Array | None) -> Array:
        # Times 2 ** 14, which the decoded codes lack.
        bits = jnp.minimum(shared.astype(jnp.int32) + 14, 254) << 23
        return lax.bitcast_convert_type(bits, jnp.float32)


def _decoded(codes: Array) -> Array:
    """Returns the numbers that the low 4 bits of bytes stand for, times 2 ** -14, in float32. XLA's CPU backend
    vectorises conversions of 16-bit floats, whose subnormal numbers the code 0.5 becomes."""
    bits = codes.astype(jnp.uint16)
    half = ((bits & 8) << 12) | ((bits & 7) << 9)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)


def rounded(groups: Array) -> Array:
    """Returns the codes nearest to weights that are divided by their scales, halves to even ones: `u8[..., N, group //
    2, G]` from `f32[..., N, G, group]`, in the order of `Mxfp4Blocks`."""
    size = jnp.minimum(jnp.abs(groups), 6)
    # Rounded to the nearest multiple of the step between codes of the same exponent.
    exponent = jnp.clip(jnp.frexp(size)[1] - 1, 0, LARGEST)
    steps = jnp.round(jnp.ldexp(size, 1 - exponent)).astype(jnp.int32)
    codes = (steps + 2 * exponent) | jnp.where(jnp.signbit(groups), 8, 0)
    low, high = codes[..., ::2].astype(jnp.uint8), codes[..., 1::2].astype(jnp.uint8)
    return jnp.swapaxes(low | high << 4, -1, -2)


def unpack(raw: np.ndarray) -> Mxfp4Blocks:
    """Returns the kernel of a GGUF file's blocks, `u8[N, G, 17]`, with NumPy arrays.

    A block is the exponent and 16 bytes, byte `j` with the codes of its inputs `j` in the low and `j + 16` in the high
    bits. In released files neighbours share a byte.
    """
    both = raw[..., 1:]
    codes = np.concatenate([both & 15, both >> 4], -1)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return Mxfp4Blocks(codes=np.ascontiguousarray(np.swapaxes(pairs, -1, -2)),      # type: ignore[arg-type]
                       scales=np.ascontiguousarray(raw[..., 0]))                    # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Mxfp4(Format):
    """4-bit floats (E2M1), with a power of two for each group of 32 inputs, determined by its largest weight."""

    def pack(self, kernel: Array, seen: Any = None) -> Mxfp4Blocks:
        w = jnp.swapaxes(kernel, -1, -2).astype(jnp.float32)
        if w.shape[-1] % GROUP:
            raise ValueError(f"kernel: got {w.shape[-1]} inputs, mxfp4 takes a multiple of {GROUP}")
        groups = w.reshape(*w.shape[:-1], -1, GROUP)
        # As in the specification: the exponent of the largest weight, less that of the largest code.
        exponents = jnp.frexp(jnp.abs(groups).max(-1))[1] - 1 - LARGEST
        exponents = jnp.clip(exponents, 1 - BIAS, BIAS)
        rest = jnp.ldexp(groups, -exponents[..., None])
        return Mxfp4Blocks(codes=rounded(rest), scales=(exponents + BIAS).astype(jnp.uint8))
