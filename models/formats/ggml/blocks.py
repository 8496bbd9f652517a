"""Packed kernels in the block formats of GGML, the library under llama.cpp.

A block is a group of 16 or 32 consecutive inputs of an output, with codes of 4 to 8 bits, a scale and, in some formats,
a minimum: a weight is `(code - offset) * scale + minimum`. The K-quants store scales and minima as small integers times
16-bit floats that several groups share.

Files store the blocks one after the other. Here each part of the blocks is an array of its own, and the place within a
group comes before the number of the group: codes are `[N, group, G]`. So a product with a row is a sum over the places
of arrays `[N, G]`, to which the scales are applied once. For products in C++ (`native`) the codes of a group are
adjacent, as in files. The number of bits is that of the file, except that the scales of K-quants take 8 bits instead of
6.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import platform
from decodax.common.struct import static, struct
from decodax.models.formats import native
from decodax.models.formats.scaled import Scaled
from decodax.models.packed import AroundKernel, Packed, dot, materialized, total


@struct
class GgmlBlocks(Packed):
    """A kernel of blocks, as read from a GGUF file or packed in one of its formats.

    Attributes:
        codes: `i8[..., N, group, G]`; or `u8[..., N, group // 2, G]` with two 4-bit codes a byte, those of the first
            half of the group in the low bits. With `by_group` the last two axes are exchanged.
        scales: `f16[..., N, G]`, or `f16[..., N, S]` if there are `steps`.
        minima: `f16[..., N, G]` or `f16[..., N, S]`, added to each weight; None: 0.
        high: `u32[..., N, G]`, the bits of the codes above the fourth, those of the first code lowest; None: no more.
        steps, minimum_steps: `[..., N, G]`, integers that the scales and minima of `G // S` consecutive groups are
            multiplied by; None: 1.
        offset: subtracted from the codes.
        by_group: True if the codes of a group are adjacent.
    """

    codes: Array
    scales: Array
    minima: Array | None = None
    high: Array | None = None
    steps: Array | None = None
    minimum_steps: Array | None = None
    offset: int = static(default=0)
    by_group: bool = static(default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *above, a, b = self.codes.shape
        return *above, a * b * self._parts

    @property
    def group(self) -> int:
        """Number of consecutive inputs in a block, which share a scale."""
        return self.codes.shape[-1 if self.by_group else -2] * self._parts

    def values(self, dtype: Any) -> Array:
        return jnp.swapaxes(jnp.concatenate(self._weights(), -2), -1, -2).reshape(self.shape).astype(dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        if self.by_group and native.takes():
            return native.matmul(x, self.codes, self.scales, group=self.group, bits=self._bits, offset=self.offset,
                                 minima=self.minima, high=self.high, steps=self.steps,
                                 minimum_steps=self.minimum_steps).astype(dtype)
        return super().times(x, dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        if platform() != "cpu":
            return dot(x, self.values(x.dtype), dtype)
        return _multiplied(self, x, jnp.dtype(dtype), self.by_sums(x))

    def multiplied(self, x: Array, dtype: Any, sums: bool) -> Array:
        """Computes `product` on CPU: by sums over the places of a group for one row, else by decoding the weights."""
        groups, group, parts = self.shape[-1] // self.group, self.group, self._parts
        rows = self._rows(x.astype(jnp.float32))
        if not sums:
            made = [dot(own.reshape(len(x), -1), part.reshape(part.shape[0], -1), dtype)
                    for own, part in zip(jnp.split(rows, parts, 1), self._weights(), strict=True)]
            # If it fused this with what follows, XLA would write decoded kernels to memory.
            return functools.reduce(jnp.add, lax.optimization_barrier(made))
        row = materialized(rows.reshape(1, -1)).reshape(group, groups)
        # The codes that share a byte come one after the other.
        order = [j + half for j in range(group // parts) for half in range(0, group, group // parts)]
        found = functools.reduce(jnp.add, (self._code(j) * row[j] for j in order))
        found = found * self._factor(self.scales, self.steps)
        shifts = self._shifts()
        if shifts is not None:
            found = found + shifts * row.sum(0)
        return total(found[:, None]).astype(dtype)

    def stored(self) -> Self:
        return self.replace(codes=self._by_place, by_group=False)

    def placed(self, outputs: str | None, inputs: str | None) -> Self:
        return self.stored()

    def divides(self, parts: int) -> bool:
        return not self.by_group and self.codes.shape[-1] % parts == 0 and self.scales.shape[-1] % parts == 0

    def here(self) -> Packed:       # type: ignore[override]
        """Returns the kernel in the form that this platform multiplies: on accelerators 4-bit or 8-bit integers in the
        order of the inputs."""
        if platform() == "cpu":
            if self.by_group or (self.group, self._bits) not in native.KINDS or not native.usable():
                return self
            return self.replace(codes=jnp.swapaxes(self.codes, -1, -2), by_group=True)
        middle = 8 if self._bits == 4 else self.offset
        codes = jnp.stack([self._code(j) - middle for j in range(self.group)], -1).reshape(self.shape)
        scales = self._factor(self.scales, self.steps)
        plain = Scaled(codes=codes.astype(jnp.int4 if self._bits == 4 else jnp.int8), scales=scales)
        if self.minima is None and middle == self.offset:
            return plain
        low = 0.0 if self.minima is None else self._factor(self.minima, self.minimum_steps)
        return ShiftedGroups(kernel=plain, shifts=low + (middle - self.offset) * scales)

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        """Returns the `PartitionSpec` of each array. The inputs are sharded by whole groups."""
        made = super().specs(outputs, inputs, sizes)
        if self.by_group:
            raise ValueError("kernel: is in the form for one device, takes one that is `placed`")
        *above, _, _, groups = made.codes
        return made.replace(codes=PartitionSpec(*above, outputs, None, groups))

    def _rows(self, x: Array) -> Array:
        """Returns rows `f[R, K]` in the order of the codes, `f[R, group, G]`."""
        return jnp.swapaxes(x.reshape(len(x), -1, self.group), 1, 2)

    @property
    def _by_place(self) -> Array:
        """The codes, with the place within a group before the number of the group."""
        return jnp.swapaxes(self.codes, -1, -2) if self.by_group else self.codes

    @property
    def _parts(self) -> int:
        """Number of codes in a byte."""
        return 2 if self.codes.dtype == jnp.uint8 else 1

    @property
    def _bits(self) -> int:
        return 8 if self.codes.dtype != jnp.uint8 else 4 if self.high is None else 4 + 32 // self.group

    def _code(self, j: int) -> Array:
        """Returns the codes at place `j` of all groups, `f32[..., N, G]`, without the offset."""
        codes = self._by_place
        if codes.dtype != jnp.uint8:
            return codes[..., j, :].astype(jnp.float32)
        half = codes.shape[-2]
        both = codes[..., j % half, :]
        code = (both >> 4 if j >= half else both & 15).astype(jnp.int32)
        if self.high is not None:
            width = 32 // self.group
            code = code | ((self.high >> (width * j)) & (2 ** width - 1)).astype(jnp.int32) << 4
        return code.astype(jnp.float32)

    def _weights(self) -> list[Array]:
        """Returns the weights in the order of the codes, `f32[..., N, group, G]`, those of 4-bit codes in halves."""
        scales = self._factor(self.scales, self.steps)[..., None, :]
        low = None if self.minima is None else self._factor(self.minima, self.minimum_steps)[..., None, :]
        made, stored = [], self._by_place
        for i in range(self._parts):
            codes = stored.astype(jnp.int32) if self._parts == 1 else (stored >> 4 if i else stored & 15
                                                                       ).astype(jnp.int32)
            if self.high is not None:
                width, places = 32 // self.group, jnp.arange(i * self.group // 2, (i + 1) * self.group // 2)
                more = self.high[..., None, :] >> (width * places[:, None]).astype(jnp.uint32)
                codes = codes | (more & (2 ** width - 1)).astype(jnp.int32) << 4
            part = (codes - self.offset).astype(jnp.float32) * scales
            made.append(part if low is None else part + low)
        return made

    def _shifts(self) -> Array | None:
        """Returns what is added to each product of a code and a scale, `f32[..., N, G]`, or None for 0."""
        shifts = None if self.minima is None else self._factor(self.minima, self.minimum_steps)
        if self.offset:
            middle = -self.offset * self._factor(self.scales, self.steps)
            shifts = middle if shifts is None else shifts + middle
        return shifts

    def _factor(self, shared: Array, steps: Array | None) -> Array:
        """Returns the scale or minimum of each group, `f32[..., N, G]`."""
        own = shared.astype(jnp.float32)
        if steps is None:
            return own
        own = jnp.repeat(own, steps.shape[-1] // own.shape[-1], -1)
        return own * steps.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("dtype", "sums"))
def _multiplied(kernel: GgmlBlocks, x: Array, dtype: Any, sums: bool) -> Array:
    """Returns `kernel.multiplied`, traced once for all kernels of a shape."""
    return kernel.multiplied(x, dtype, sums)


@struct
class ShiftedGroups(AroundKernel):
    """A kernel of codes and scales, plus a number for each output and group of `K // groups` consecutive inputs.

    Attributes:
        kernel: the codes and scales, with `N` outputs and `K` inputs.
        shifts: `f32[..., N, groups]`, added to each weight of a group.
    """

    kernel: Scaled
    shifts: Array

    def values(self, dtype: Any) -> Array:
        group = self.shape[-1] // self.shifts.shape[-1]
        return (self.kernel.values(jnp.float32) + jnp.repeat(self.shifts, group, -1)).astype(dtype)

    def divides(self, parts: int) -> bool:
        return self.kernel.divides(parts) and (self.shifts.shape[-1] == 1 or self.shifts.shape[-1] % parts == 0)

    def product(self, x: Array, dtype: Any) -> Array:
        sums = x.astype(jnp.float32).reshape(len(x), self.shifts.shape[-1], -1).sum(-1)
        more = lax.dot_general(sums, self.shifts, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return (self.kernel.product(x, jnp.float32) + more).astype(dtype)


def blocks(codes: Array, scales: Array, bits: int, **more: Any) -> GgmlBlocks:
    """Returns a kernel from codes, `i32[..., N, G, group]`, from 0 on if they have less than 8 bits.

    Args:
        codes: the codes.
        scales: see `GgmlBlocks`.
        bits: number of bits of a code: 4, 5, 6 or 8. Above 4, `32 // group` of them are stored in `high`.
        more: the other fields.
    """
    codes = jnp.swapaxes(codes, -1, -2)
    if bits == 8:
        return GgmlBlocks(codes=codes.astype(jnp.int8), scales=scales, **more)
    group = codes.shape[-2]
    low, top = jnp.split(codes & 15, 2, -2)
    if bits > 4:
        width = 32 // group
        places = width * jnp.arange(group, dtype=jnp.uint32)[:, None]
        more["high"] = ((codes >> 4).astype(jnp.uint32) << places).sum(-2, dtype=jnp.uint32)
    return GgmlBlocks(codes=(low | top << 4).astype(jnp.uint8), scales=scales, **more)
