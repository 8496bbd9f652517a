"""The forms of published quantised checkpoints that no other format here has: kernels of integers with zero points,
kernels whose inputs are permuted, and kernels of codes into one table."""

from __future__ import annotations

from typing import Any, Self

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from decodax.common.axes import free_axes, platform
from decodax.common.struct import static, struct
from decodax.models.formats.ggml.blocks import ShiftedGroups
from decodax.models.formats.scaled import Convert, Scaled
from decodax.models.packed import AroundKernel, Packed, dot

WIDENED = 1 << 22
"""On accelerators, number of weights of a table that are converted at a time, since XLA writes them to memory."""


@struct
class ZeroPoints(AroundKernel):
    """A kernel of integers from each of which the zero point of its group is subtracted: a weight is `(code - zero) *
    scale`.

    Zero points are kept as integers instead of the products with their scales, which would take 32 bits.

    Attributes:
        kernel: the codes and scales.
        zeros: `i8[..., N, groups]`, one for every `K // groups` consecutive inputs.
    """

    kernel: Scaled
    zeros: Array

    def values(self, dtype: Any) -> Array:
        return self._shifted.values(dtype)

    def divides(self, parts: int) -> bool:
        return self.kernel.divides(parts)

    def product(self, x: Array, dtype: Any) -> Array:
        return self._shifted.product(x, dtype)

    def here(self) -> Packed:       # type: ignore[override]
        return self if platform() == "cpu" else self._shifted.here()

    @property
    def _shifted(self) -> ShiftedGroups:
        scales = self.kernel.scales
        assert scales is not None
        return ShiftedGroups(kernel=self.kernel, shifts=-self.zeros.astype(jnp.float32) * scales.astype(jnp.float32))


@struct
class InputsPermuted(AroundKernel):
    """A kernel whose inputs are permuted before they are multiplied, so that those that share a scale are consecutive
    (GPTQ with act-order).

    Attributes:
        kernel: the kernel of the permuted inputs.
        order: `i32[..., K]`: input `j` of the kernel is input `order[j]` of the product.
    """

    kernel: Packed
    order: Array

    def values(self, dtype: Any) -> Array:
        back = jnp.argsort(self.order, -1)
        return jnp.take_along_axis(self.kernel.values(dtype), back[..., None, :], -1)

    def product(self, x: Array, dtype: Any) -> Array:
        return self.kernel.product(x[:, self.order], dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        return self.kernel.times(x[:, self.order], dtype)

    def rows(self, which: Array, dtype: Any) -> Array:
        return self.kernel.rows(which, dtype)[..., jnp.argsort(self.order)]

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        """Returns the `PartitionSpec` of each array. Every device has the whole order."""
        return self.replace(kernel=self.kernel.specs(outputs, inputs, sizes),
                            order=PartitionSpec(*[None] * self.order.ndim))


@struct
class Levels(Scaled):
    """A kernel of 4-bit codes into a table that all outputs share, such as NF4 of QLoRA (Dettmers et al., 2023): a
    weight is the table's value times the scale of its output and group of inputs.

    The value is selected bit by bit, which a CPU vectorises; a lookup would take weights one by one.

    Attributes:
        codes: `u8[..., N, K // 2]`, for the first half of the inputs in the low bits; on accelerators `u4[..., N, K]`.
        scales: `f32[..., N, groups]`.
        table: the 16 values.
    """

    table: tuple[float, ...] = static(default=())

    @property
    def converts(self) -> bool:
        return True

    def times(self, x: Array, dtype: Any) -> Array:
        block = WIDENED // self.shape[-1] + 1
        if platform() == "cpu" or free_axes() or self.shape[0] < 2 * block:
            return super().times(x, dtype)
        return self.by_blocks(x, dtype, block)

    def product(self, x: Array, dtype: Any) -> Array:
        return super().product(x, dtype) if platform() == "cpu" else dot(x, self.values(x.dtype), dtype)

    def stored(self) -> Self:
        made = self.replace(axes=None)
        if self.codes.dtype != jnp.uint4:
            return made
        low, high = jnp.split(self.codes.astype(jnp.uint8), 2, -1)
        return made.replace(codes=low | (high << 4))

    def here(self) -> Self:
        if platform() == "cpu" or self.codes.dtype == jnp.uint4:
            return self
        return self.replace(codes=jnp.concatenate([self.codes & 15, self.codes >> 4], -1).astype(jnp.uint4))

    def _halves(self) -> tuple[tuple[Array, Convert], ...]:
        if self.codes.dtype == jnp.uint4:
            return (self.codes.astype(jnp.uint8), self._low),
        return (self.codes, self._low), (self.codes, self._high)

    def _low(self, codes: Array, dtype: Any) -> Array:
        return self._level(codes, dtype, 0)

    def _high(self, codes: Array, dtype: Any) -> Array:
        return self._level(codes, dtype, 4)

    def _level(self, codes: Array, dtype: Any, shift: int) -> Array:
        left: list[Any] = [jnp.asarray(value, dtype) for value in self.table]
        for bit in range(shift, shift + 4):
            one = (codes & (1 << bit)) != 0
            left = [jnp.where(one, odd, even) for even, odd in zip(left[::2], left[1::2], strict=True)]
        return left[0]
