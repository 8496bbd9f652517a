"""Kernels of 8-bit integers, whose inputs are quantized with scales that are fixed beforehand, and rotations of inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.axes import platform
from decodax.common.hadamard import doubled, rotation
from decodax.common.struct import struct
from decodax.models.formats.qserve import EXACT
from decodax.models.packed import AroundKernel, Packed, dot, partial_sums, total
from decodax.pallas_kernels.packed_matmul.reference import scaled

GROUP = 128
"""Number of inputs of an output that share a scale of 4-bit weights."""


@struct
class Integers(Packed):
    """A kernel of 8-bit integers. Products with rows of integers from -128 to 127 are exact.

    Attributes:
        codes: `i8[N, K]`, the integers; or `u8[N, K // 2]`, 4-bit codes from -8 to 7 plus 8, for the first half of the
            inputs in the low bits and for the second half in the high bits.
        steps: `f16[N, groups]`: an integer is its code times the step of its group, rounded; None: it is the code.
    """

    codes: Array
    steps: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        N, K = self.codes.shape
        return N, K * (2 if self.codes.dtype == jnp.uint8 else 1)

    def values(self, dtype: Any) -> Array:
        if self.codes.dtype != jnp.uint8:
            return self.codes.astype(dtype)
        half = self.codes.shape[-1]
        return jnp.concatenate([self._integers(0, half), self._integers(half, 2 * half)], -1).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        """Multiplies rows `f[R, K]` by the kernel: `[R, N]` in `dtype`, which may be int32."""
        if platform() != "cpu":
            return dot(x.astype(jnp.int8), self.values(jnp.int8), jnp.int32).astype(dtype)
        whole, K = self.shape[-1], self.codes.shape[-1]
        steps = self._steps
        group = None if steps is None else whole // steps.shape[-1]
        size = max(EXACT // (group or 1), 1) * (group or 1)     # XLA has no fast integer products on CPU
        parts = []
        for half in range(0, whole, K):
            for first in range(half, half + K, size):
                last = min(first + size, half + K)
                rows = x[:, first:last].astype(jnp.float32)
                part = lambda start, stop, first=first: self._integers(first + start, first + stop)
                parts.append(total(partial_sums(rows, part, group=group)) if self.by_sums(x) else
                             dot(rows, part(0, last - first), jnp.float32))
        parts = lax.optimization_barrier(parts)     # fused, XLA would write converted kernels to memory
        return functools.reduce(jnp.add, [part.astype(jnp.int32) for part in parts]).astype(dtype)

    def _integers(self, start: int, stop: int) -> Array:
        """Returns the integers of the inputs from `start` to `stop`, `f32[N, stop - start]`. The inputs belong to one
        half, and to whole groups or a single group."""
        if self.codes.dtype != jnp.uint8:
            return self.codes[:, start:stop].astype(jnp.float32)
        half = self.codes.shape[-1]
        codes = self.codes[:, start % half:start % half + stop - start]
        # Converted by way of int32, which XLA's CPU backend vectorises.
        codes = (codes >> 4 if start >= half else codes & 15).astype(jnp.int32).astype(jnp.float32) - 8
        steps = self._steps
        if steps is None:
            return codes
        group = 2 * half // steps.shape[-1]
        own = steps[:, start // group:-(-stop // group)].astype(jnp.float32)
        return jnp.clip(jnp.round(scaled(codes, own)), -128, 127)

    @property
    def _steps(self) -> Array | None:
        """The steps, with groups divided so that each lies within one half of the inputs."""
        return self.steps if self.steps is None or self.steps.shape[-1] % 2 == 0 else jnp.repeat(self.steps, 2, -1)


@struct
class Static(AroundKernel):
    """A kernel of integers for static quantization: inputs, and outputs if they stay in 8 bits, are quantized with
    scales that are fixed beforehand.

    Attributes:
        kernel: the integers.
        scales: `f32[N, 1]`, scale of each output's weights.
        step: `f32[1, 1]`, scale of the inputs.
        outs: `f32[N, 1]`, scales of the outputs; None: outputs are not quantized.
    """

    kernel: Integers
    scales: Array
    step: Array
    outs: Array | None = None

    def values(self, dtype: Any) -> Array:
        return (self.kernel.values(jnp.float32) * self.scales).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return self._scaled(x, dtype, self.kernel.product)

    def times(self, x: Array, dtype: Any) -> Array:
        return self._scaled(x, dtype, self.kernel.times)

    def rows(self, which: Array, dtype: Any) -> Array:
        return self.values(dtype)[which]

    def _scaled(self, x: Array, dtype: Any, multiply: Callable[[Array, Any], Array]) -> Array:
        found = multiply(codes_of(x.astype(jnp.float32), self.step), jnp.int32).astype(jnp.float32)
        if self.outs is None:
            return (found * (self.scales * self.step)[:, 0]).astype(dtype)
        codes = jnp.clip(jnp.round(found * (self.scales / self.outs * self.step)[:, 0]), -128, 127)
        return (codes * self.outs[:, 0]).astype(dtype)


@struct
class InputsRotated(AroundKernel):
    """A kernel whose inputs are rotated by a Hadamard matrix before they are multiplied; see `rotate`."""

    kernel: Packed

    def values(self, dtype: Any) -> Array:
        back = jnp.asarray(rotation(self.shape[-1]).T, jnp.float32)
        return (self.kernel.values(jnp.float32) @ back).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return self.kernel.product(rotate(x), dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        return self.kernel.times(rotate(x), dtype)


def rotate(x: Array) -> Array:
    """Computes `x @ rotation(K)` for rows `f[..., K]`, in float32, without the matrix.

    >>> rotate(jnp.array([[1.0, 3.0]])).round(3).tolist()
    [[2.828000068664551, -1.4140000343322754]]
    """
    K = x.shape[-1]
    core, many = doubled(K)
    y = x.astype(jnp.float32).reshape(-1, many, len(core)) @ jnp.asarray(core, jnp.float32)
    width = many
    while width > 1:
        y = y.reshape(len(y), -1, 2, width // 2, len(core))
        y = jnp.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2)
        width //= 2
    return (y.reshape(x.shape) / jnp.float32(K ** 0.5)).astype(x.dtype)


def codes_of(x: Array, scale: Array) -> Array:
    """Returns numbers divided by their scale and rounded to the nearest 8-bit integer, as floats from -128 to 127."""
    return jnp.clip(jnp.round(x / scale), -128, 127)


def quarter(w: np.ndarray, inner: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Quantizes weights `f16[N, K]` to 4 bits: codes from -8 to 7, a scale of each output `f32[N, 1]`, and steps
    `f16[N, groups]`.

    With up to 128 inputs an output has one scale, and codes from -7 to 7.

    Args:
        w: the weights.
        inner: True for W4A8: codes times steps, rounded, are 8-bit integers, which are multiplied by the output's
            scale. False for W4A16: codes times steps are the weights, and the scales are 1.
    """
    w = w.astype(np.float16)
    N, K = w.shape
    one = np.ones((N, 1), np.float32)
    if K <= GROUP:
        scales = np.abs(w).max(-1, keepdims=True) / np.float16(7)
        codes = np.clip(_rounded(w, scales), -7, 7)
        return (codes, scales.astype(np.float32), None) if inner else (codes, one, scales)
    size = math.gcd(GROUP, K)
    groups = w.reshape(N, K // size, size)
    found = (np.abs(groups).max(-1).astype(np.float32) * np.float32(2 / 15)).astype(np.float16)
    codes = np.clip(_rounded(groups, found[..., None]) + 8, 0, 15) - 8
    if not inner:
        return codes.reshape(N, K), one, found
    whole = (codes.astype(np.float16) * found[..., None]).reshape(N, K)
    scales = (np.abs(whole).max(-1, keepdims=True) / np.float16(127)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        fused = np.nan_to_num((found / scales).astype(np.float16), posinf=0)
    return codes.reshape(N, K), scales, fused


def _rounded(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.round(w / scales), posinf=0, neginf=0).astype(np.int32)


def nibbles(codes: np.ndarray, offset: int) -> Array:
    low, high = np.split((codes + offset).astype(np.uint8) & 15, 2, -1)
    return jnp.asarray(low | (high << 4))
