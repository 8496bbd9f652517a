"""Formats that round each weight to the nearest code, without calibration data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Self

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import platform
from decodax.common.options import Range
from decodax.common.struct import static, struct
from decodax.models.formats import native
from decodax.models.formats.format import Format
from decodax.models.packed import LANES, Packed, dot, partial_sums, total
from decodax.pallas_kernels.packed_matmul import Axes, packed_matmul
from decodax.pallas_kernels.packed_matmul.reference import scaled

Convert = Callable[[Array, Any], Array]
"""A function from codes and a dtype to the numbers that the codes stand for."""


@struct
class Scaled(Packed):
    """A kernel as codes and scales: each weight is its code times the scale of its output, or of its output and group
    of inputs.

    Attributes:
        codes: `[..., N, K]` of any dtype; or `u8[..., N, K // 2]` with 4-bit codes, for the first half of the inputs in
            the low bits and for the second half in the high bits.
        scales: `f32[..., N, groups]`, one for every `K // groups` consecutive inputs, on CPU also of 16 bits; None:
            codes are weights.
        axes: the mesh axes over which outputs and inputs are sharded; None: unknown.
    """

    codes: Array
    scales: Array | None = None
    axes: Axes | None = static(default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        *above, K = self.codes.shape
        return *above, K * (2 if self.codes.dtype == jnp.uint8 else 1)

    @property
    def converts(self) -> bool:
        return self.codes.dtype != jnp.float32

    def values(self, dtype: Any) -> Array:
        codes = [convert(codes, jnp.float32) for codes, convert in self._halves()]
        parts = [c if s is None else scaled(c, s) for c, s in zip(codes, self._scales(len(codes)), strict=True)]
        return jnp.concatenate(parts, -1).astype(dtype) if len(parts) > 1 else parts[0].astype(dtype)

    def placed(self, outputs: str | None, inputs: str | None) -> Self:
        return self.replace(axes=(outputs, inputs))

    def divides(self, parts: int) -> bool:
        groups = 1 if self.scales is None else self.scales.shape[-1]
        return self.codes.dtype != jnp.uint8 and self.shape[-1] % parts == 0 and (groups == 1 or groups % parts == 0)

    def stored(self) -> Self:
        made = self.replace(axes=None)
        if self.codes.dtype != jnp.int4:
            return made
        codes, K = self.codes.astype(jnp.int8), self.codes.shape[-1]
        if K % 2:
            return made.replace(codes=codes)
        low, high = codes[..., :K // 2].astype(jnp.uint8), codes[..., K // 2:].astype(jnp.uint8)
        return made.replace(codes=(low & 15) | (high << 4))

    def here(self) -> Self:
        if platform() == "cpu":
            return self
        if self.scales is not None and self.scales.dtype != jnp.float32:
            return self.replace(scales=self.scales.astype(jnp.float32)).here()
        if self.codes.dtype != jnp.uint8:
            return self
        return self.replace(codes=jnp.concatenate([convert(codes, jnp.int4) for codes, convert in self._halves()], -1))

    def times(self, x: Array, dtype: Any) -> Array:
        by_output = self.scales is None or self.scales.shape[-1] == 1
        if not (by_output and len(x) <= native.ROWS and self.codes.dtype.name in native.WIDE and native.takes()):
            return super().times(x, dtype)
        y = native.rows(x, self.codes)
        return (y if self.scales is None else y * self.scales[:, 0]).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        if platform() != "cpu" and self.scales is not None and self.scales.shape[-1] > 1:
            return packed_matmul(x, self.codes, self.scales, dtype, axes=self.axes)
        # XLA's CPU backend has no fast half-precision products.
        own = jnp.dtype(jnp.float32) if platform() == "cpu" else x.dtype
        halves = self._halves()
        whole = self.scales is not None and self.scales.shape[-1] == 1      # one scale per output: after the product
        multiply = self._sums if self.by_sums(x) else self._dot
        rows = jnp.split(x.astype(own), len(halves), -1)
        parts = [multiply(row, codes, convert, None if whole else s, jnp.promote_types(own, dtype))
                 for row, (codes, convert), s in zip(rows, halves, self._scales(len(halves)), strict=True)]
        if self.by_sums(x):
            y = total(functools.reduce(jnp.add, parts))
        else:       # if it fused this with what follows, XLA would write converted kernels to memory
            y = functools.reduce(jnp.add, lax.optimization_barrier(parts) if len(parts) > 1 else parts)
        return (y * self.scales[..., 0] if whole and self.scales is not None else y).astype(dtype)

    def _dot(self, x: Array, codes: Array, convert: Convert, scales: Array | None, dtype: Any) -> Array:
        kernel = convert(codes, x.dtype)
        return dot(x, kernel if scales is None else scaled(kernel, scales), dtype)

    def _sums(self, x: Array, codes: Array, convert: Convert, scales: Array | None, dtype: Any) -> Array:
        part = lambda start, stop: convert(codes[:, start:stop], x.dtype)
        if scales is None or (group := x.shape[1] // scales.shape[1]) >= LANES:
            return partial_sums(x, part, scales)
        return partial_sums(x, lambda start, stop: scaled(part(start, stop), scales[:, start // group:stop // group]),
                            group=group)

    def _halves(self) -> tuple[tuple[Array, Convert], ...]:
        """Returns codes of consecutive inputs, and the functions that convert them."""
        if self.codes.dtype == jnp.uint8:
            return (self.codes, _low), (self.codes, _high)
        if self.codes.dtype == jnp.float8_e4m3fn and platform() == "cpu":
            return (lax.bitcast_convert_type(self.codes, jnp.uint8), _float8),
        return (self.codes, lambda codes, dtype: codes.astype(dtype)),

    def _scales(self, parts: int) -> tuple[Array | None, ...]:
        if self.scales is None or self.scales.shape[-1] == 1:
            return (self.scales,) * parts
        groups = self.scales.shape[-1]
        return tuple(jnp.split(self.scales if groups % parts == 0 else jnp.repeat(self.scales, parts, -1), parts, -1))


def _low(codes: Array, dtype: Any) -> Array:
    return lax.shift_right_arithmetic(codes.astype(jnp.int8) << 4, jnp.int8(4)).astype(dtype)


def _high(codes: Array, dtype: Any) -> Array:
    return lax.shift_right_arithmetic(codes.astype(jnp.int8), jnp.int8(4)).astype(dtype)


def _float8(codes: Array, dtype: Any) -> Array:
    """Converts the bits of 8-bit floats. XLA's CPU backend converts these one by one, but vectorises 16-bit floats."""
    bits = codes.astype(jnp.uint16)
    # Sign, exponent and mantissa as in float16, whose exponent bias is larger by eight; NaN is all ones.
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(dtype) * jnp.asarray(256, dtype))


@dataclasses.dataclass(frozen=True)
class Int8(Format):
    """8-bit integers with one scale for each output, determined by its largest weight."""

    def pack(self, kernel: Array, seen: Any = None) -> Scaled:
        w = _rows(kernel)
        scales = _or_one(jnp.abs(w).max(-1, keepdims=True) / 127)
        return Scaled(codes=jnp.round(w / scales).astype(jnp.int8), scales=scales)


@dataclasses.dataclass(frozen=True)
class Int4(Format):
    """4-bit integers from -7 to 7 with one scale for each output and group of inputs.

    Attributes:
        group: number of inputs in a group; if it does not divide the number of inputs, their greatest common divisor.
    """

    group: Annotated[int, Range(2)] = 128

    def pack(self, kernel: Array, seen: Any = None) -> Scaled:
        w = _rows(kernel)
        K = w.shape[-1]
        # A group must lie within the half whose codes share a byte's low or high bits.
        group = math.gcd(self.group, K // 2 if K % 2 == 0 else K)
        groups = w.reshape(*w.shape[:-1], K // group, group)
        scales = _or_one(jnp.abs(groups).max(-1) / 7)
        codes = jnp.round(groups / scales[..., None]).astype(jnp.int8).reshape(w.shape)
        made = Scaled(codes=codes.astype(jnp.int4), scales=scales)
        return made if platform() != "cpu" else made.stored()       # XLA's CPU backend unpacks 4 bits slowly


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """8-bit floats (4 exponent and 3 mantissa bits: "e4m3fn") with one scale for each output, determined by its largest
    weight."""

    def pack(self, kernel: Array, seen: Any = None) -> Scaled:
        w = _rows(kernel)
        scales = _or_one(jnp.abs(w).max(-1, keepdims=True) / 448)
        return Scaled(codes=(w / scales).astype(jnp.float8_e4m3fn), scales=scales)


@dataclasses.dataclass(frozen=True)
class Floats(Format):
    """Floats without scales, multiplied with activations of any dtype.

    Attributes:
        dtype: "bfloat16", "float16" or "float32". The last only transposes the kernel: on CPU up to 16 rows are
            multiplied faster this way where there is a C++ compiler (`native`), and without one a single row.
    """

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype: got {self.dtype!r}, takes 'bfloat16', 'float16' or 'float32'")

    def pack(self, kernel: Array, seen: Any = None) -> Scaled:
        return Scaled(codes=jnp.swapaxes(kernel, -1, -2).astype(self.dtype))


def _rows(kernel: Array) -> Array:
    return jnp.swapaxes(kernel, -1, -2).astype(jnp.float32)


def _or_one(scales: Array) -> Array:
    """Replaces scales of 0, for rows of zeros, by 1."""
    return jnp.where(scales == 0, 1, scales)
