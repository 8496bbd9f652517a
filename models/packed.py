"""Kernels that are stored in fewer bits than they are multiplied in.

A decoding step reads each weight once and multiplies it with a few rows, so its time is the time to read the weights. A
`Packed` kernel replaces an array in a model's weights; `multiply` is all that a network needs to know of it.

On a TPU or GPU, XLA converts a packed kernel within a product. On a TPU it does not for groups of inputs with separate
scales; `packed_matmul` does.

On CPU, depending on its version, XLA would write the converted kernel to memory, or add up the inputs of an output one
after the other, since it may not change the order of additions. So for one row the program spells out vector sums:
`partial_sums` cuts the inputs of a kernel into slices of one width, converts each slice and adds its products to those
of the others, entry by entry, and `total` adds up the few sums that are left for an output. Several rows are multiplied
by XLA's own product, with a block of outputs converted at a time that fits into the processor's cache; their sums are
rounded in another order than those of one row, as with arrays.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import free_axes, platform
from decodax.common.struct import Struct, static, struct

LANES = 32
"""On CPU, the width of slices of the inputs is a multiple of this number."""

SLICES = 15
"""On CPU, the largest number of slices of inputs that share their scales. With more, XLA computes the array that they
are cut from separately and writes it to memory."""

BLOCK = 1 << 20
"""On CPU, number of weights that are converted at a time for several rows. 8 rows and 2,048 x 768 in int8 take 0.37 ms,
against 0.46 with a quarter of it; float32 takes 0.37 (JAX 0.12, kernels that are in no cache)."""

DECODED = 1 << 18
"""On CPU, number of weights converted at a time by formats whose weights take longer to decode than to multiply."""

SUMS = 1 << 18
"""On CPU, number of partial sums of one row that are written at a time."""


class Packed(Struct, abc.ABC):
    """Base class of packed kernels with `K` inputs and `N` outputs, or of `E` such kernels, one for each expert.

    Arrays have shape `[N, ...]` or `[E, N, ...]`, so that the data of an output are adjacent.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights, `(N, K)` or `(E, N, K)`, which is not that of the stored arrays. An unpacked kernel has
        the last two axes the other way round, `[K, N]`."""

    @property
    def converts(self) -> bool:
        """True if a product needs the stored codes to be converted to numbers of the activations' dtype first; False if
        XLA multiplies the stored array directly."""
        return True

    @abc.abstractmethod
    def values(self, dtype: Any) -> Array:
        """Returns the weights as an array `f[..., N, K]`."""

    @abc.abstractmethod
    def product(self, x: Array, dtype: Any) -> Array:
        """Multiplies `x`, `f[R, K]`, by the kernel: `f[R, N]` in `dtype`. Derived classes define it; `times` calls it,
        for large `R` with blocks of outputs."""

    def times(self, x: Array, dtype: Any) -> Array:
        """Multiplies `x`, `f[R, K]`, by the kernel in the way that is fastest on the platform: `f[R, N]` in `dtype`."""
        if platform() != "cpu" or free_axes():
            return self.product(x, dtype)
        N, K = self.shape
        if self.by_sums(x):
            x, block = materialized(x), SUMS // slices(K)[0]
            return self.product(x, dtype) if N < 2 * block else self.by_blocks(x, dtype, block)
        if N == 1 or not self.converts:
            return self.product(x, dtype)
        return self.by_blocks(x, dtype, BLOCK // K + 1)

    def by_sums(self, x: Array) -> bool:
        """True if `product` uses `partial_sums`: for one row, on CPU, with weights that are converted."""
        return platform() == "cpu" and not free_axes() and len(x) == 1 and self.converts

    def by_blocks(self, x: Array, dtype: Any, block: int) -> Array:
        """Multiplies `x`, `f[R, K]`, by the kernel, converting the weights of `block` outputs at a time: `f[R, N]`. `N`
        is at least 2."""
        N = self.shape[0]
        block = min(block, N // 2)          # at least two blocks: XLA unrolls a loop of one
        count = N // block

        def one(i: Array) -> Array:
            own, i = lax.optimization_barrier((self, i))    # else XLA converts the whole kernel before the loop
            return own.part(i * block, block).product(x, dtype)

        made = lax.map(one, jnp.arange(count, dtype=jnp.int32)).transpose(1, 0, 2).reshape(len(x), -1)
        if rest := N - count * block:
            made = jnp.concatenate([made, self.part(N - rest, rest).product(x, dtype)], 1)
        return made

    def part(self, start: Array | int, size: int) -> Self:
        """Returns the kernel of `size` outputs from `start` on."""
        return jax.tree.map(lambda a: _as_bits(lambda b: lax.dynamic_slice_in_dim(b, start, size), a), self)

    def rows(self, which: Array, dtype: Any) -> Array:
        """Returns the weights of the outputs `which` (`i32[...]`), `f[..., K]`: embeddings, if the table is also the
        head."""
        return jax.tree.map(lambda a: _as_bits(lambda b: b[which], a), self).values(dtype)

    def placed(self, outputs: str | None, inputs: str | None) -> Self:
        """Returns the kernel prepared for a mesh, over whose axes its outputs and inputs are sharded; None: they are
        not."""
        return self

    def stored(self) -> Self:
        """Returns the kernel in the platform-independent form that is saved to a file, the inverse of `here`."""
        return self

    def here(self) -> Self:
        """Returns a `stored` kernel in the form that is multiplied on this platform. It is called under jit."""
        return self

    def divides(self, parts: int) -> bool:
        """True if each array can be divided into `parts` along the inputs, so that each part is a kernel of consecutive
        inputs. Then the products of several devices can be added."""
        return False

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        """Returns a `PartitionSpec` for each array, of which the last two axes are outputs and inputs. `outputs` and
        `inputs` are the mesh axes over which these are sharded (None: not), `sizes` the sizes of the mesh axes. An
        array's inputs are not sharded if their number is not a multiple of the axis's size."""
        def one(a: Array) -> PartitionSpec:
            last = inputs if inputs is not None and a.shape[-1] % sizes[inputs] == 0 else None
            return PartitionSpec(*[None] * (a.ndim - 2), outputs, last)

        return jax.tree.map(one, self)


class AroundKernel(Packed):
    """Base class of packed kernels that change the inputs, the outputs or the weights of another, their field `kernel`.
    """

    kernel: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    def placed(self, outputs: str | None, inputs: str | None) -> Self:
        return self.replace(kernel=self.kernel.placed(outputs, inputs))

    def stored(self) -> Self:
        return self.replace(kernel=self.kernel.stored())

    def here(self) -> Self:
        return self.replace(kernel=self.kernel.here())


def by_expert(specs: Any, axis: str | None) -> Any:
    """Returns the layouts `specs` of the arrays of a kernel of all experts (`Packed.specs`) with the experts divided
    over a mesh axis; None: they are not."""
    return jax.tree.map(lambda spec: PartitionSpec(axis, *spec[1:]), specs,
                        is_leaf=lambda x: isinstance(x, PartitionSpec))


def for_platform(stored: Packed) -> Packed:
    """Returns a stored kernel in the form that is multiplied on this platform (`Packed.here`).

    On accelerators the conversion is jitted: one program is compiled for each format and shape. On CPU it is not, since
    most kernels are multiplied there as they are stored, and a program would copy them.
    """
    return stored.here() if platform() == "cpu" else _here(stored)


@jax.jit
def _here(stored: Packed) -> Packed:
    return stored.here()


def dot(x: Array, kernel: Array, dtype: Any) -> Array:
    """Computes `x @ kernel.T`: `f[R, N]` from `f[R, K]` and `f[N, K]`, in the fastest way on the platform.

    Args:
        x: the rows.
        kernel: the weights, as an array that is not packed.
        dtype: dtype of the result.
    """
    if platform() != "cpu":
        return jnp.matmul(x, kernel.T, preferred_element_type=dtype)
    # In the other order, XLA would write the kernel once more, transposed.
    return lax.dot_general(kernel, x, (((1,), (1,)), ((), ()))).T.astype(dtype)


def slices(K: int, group: int | None = None) -> tuple[int, list[tuple[int, int]]]:
    """Cuts `K` inputs into slices of one width.

    Args:
        K: number of inputs.
        group: number of inputs that share a scale. A slice has inputs of one group, or whole groups of fewer than
            `LANES`.

    Returns:
        The width of the slices, and for each slice its start and the number of its first inputs that also belong to the
        previous slice.

    >>> slices(80), slices(128, group=64)
    ((32, [(0, 0), (32, 0), (48, 16)]), (32, [(0, 0), (32, 0), (64, 0), (96, 0)]))
    """
    size = K if group is None or group < LANES else group
    unit = LANES if size == group else math.lcm(LANES, group or 1)
    several = max(SLICES * size // K, 1)
    width = min(-(-size // (unit * several)) * unit, size)
    within = [min(start, size - width) for start in range(0, size, width)]
    return width, [(base + start, i * width - start) for base in range(0, K, size) for i, start in enumerate(within)]


def partial_sums(x: Array, part: Callable[[int, int], Array], scales: Array | None = None, group: int | None = None
                 ) -> Array:
    """Multiplies a row by a kernel on CPU, except for the last additions, which `total` does.

    Args:
        x: `f32[1, K]`.
        part: returns the weights of the inputs from a start to a stop, `f32[N, stop - start]`. It cuts codes before
            converting them.
        scales: `f32[N, groups]`, one for each group of inputs; None: 1.
        group: number of inputs that share a scale; by default that of `scales`.

    Returns:
        `f32[N, 1, width]`.
    """
    K = x.shape[1]
    groups = 1 if scales is None else scales.shape[1]
    width, cut = slices(K, K // groups if scales is not None else group)
    sums: list[Array | None] = [None] * groups
    for start, again in cut:
        some = x[:, start:start + width]
        if again:
            some = jnp.where(jnp.arange(width) < again, 0, some)
        own, g = part(start, start + width)[:, None] * some, start * groups // K
        sums[g] = own if (before := sums[g]) is None else before + own
    return functools.reduce(jnp.add, (y if scales is None else y * scales[:, g, None, None]
                                      for g, y in enumerate(sums) if y is not None))


def total(sums: Array) -> Array:
    """Returns `f32[R, N]` from `partial_sums`, adding in an order that does not depend on the program."""
    made = lax.optimization_barrier(sums)       # else XLA recomputes them for each addition
    made = jnp.pad(made, ((0, 0), (0, 0), (0, -made.shape[-1] % 8)))
    made = functools.reduce(jnp.add, [made[..., i:i + 8] for i in range(0, made.shape[-1], 8)])
    while made.shape[-1] > 1:
        half = made.shape[-1] // 2
        made = made[..., :half] + made[..., half:]
    return made[..., 0].T


def materialized(x: Array) -> Array:
    """Returns `x` written to memory.

    Otherwise XLA fuses its computation into the product and repeats it for each output. No fusion crosses a
    conditional. The result of the other branch, NaN, is what the product of a NaN would be anyway.
    """
    some = x.reshape(-1)[0]
    return lax.cond(some == some, lambda: x, lambda: x.at[0].set(jnp.nan))


def _as_bits(take: Callable[[Array], Array], a: Array) -> Array:
    """Returns `take(a)`, where `take` selects some entries of an array, computed on integers with the same bits.

    For floats of less than 32 bits, XLA's CPU backend would otherwise copy the whole array in a wider dtype before the
    loop.
    """
    bits = a.dtype.itemsize * 8
    if platform() != "cpu" or bits >= 32 or not jnp.issubdtype(a.dtype, jnp.floating):
        return take(a)
    return lax.bitcast_convert_type(take(lax.bitcast_convert_type(a, f"uint{bits}")), a.dtype)


@struct
class Adapted(Struct):
    """A kernel with a low-rank product added, `kernel + a @ b` (LoRA, Hu et al., 2021). LoRA's factor `alpha / r` is
    part of `b`.

    Attributes:
        kernel: `f[K, N]`, or packed.
        a: `f[K, r]`; for several adapters `f[A, K, r]`, of which the method `chosen` selects one for each row.
        b: `f[r, N]`; for several adapters `f[A, r, N]`.
        by_row: True in the result of `chosen`: the leading axis of `a` and `b` is that of the batch, not of the
            adapters.
    """

    kernel: Array | Packed
    a: Array
    b: Array
    by_row: bool = static(default=False)

    def chosen(self, which: Array) -> Adapted:
        """Returns the kernel for rows that use the adapters `which` (`i32[B]`)."""
        return self.replace(a=self.a[which], b=self.b[which], by_row=True)

    def times(self, x: Array, dtype: Any) -> Array:
        """Multiplies `x`, `f[..., K]`, by the kernel: `f[..., N]`. With an adapter for each row, `x` is `f[B, W, K]`.
        """
        if self.a.ndim == 3 and not (self.by_row and x.ndim == 3):
            raise ValueError("adapter: got one per row, which this method does not support; takes one for all rows "
                             "(decodax.adapters.apply or merge)")
        low = jnp.matmul(x, self.a.astype(x.dtype))
        more = jnp.matmul(low, self.b.astype(x.dtype), preferred_element_type=dtype)
        return multiply(x, self.kernel, dtype) + more

    def merged(self) -> Array:
        """Returns `kernel + a @ b` in float32, `f[K, N]`."""
        whole = self.kernel.values(jnp.float32).T if isinstance(self.kernel, Packed) else self.kernel
        return whole.astype(jnp.float32) + jnp.matmul(self.a, self.b, preferred_element_type=jnp.float32)


Kernel = Array | Packed | Adapted
"""A kernel of a layer: `f[K, N]`, the same packed, or adapted."""


def multiply(x: Array, kernel: Kernel, dtype: Any = None) -> Array:
    """Computes `x @ kernel`: `f[..., N]` from `f[..., K]`.

    Args:
        x: the rows.
        kernel: an array, packed or adapted.
        dtype: dtype of the result; by default that of `x`.
    """
    if isinstance(kernel, Adapted):
        return kernel.times(x, dtype or x.dtype)
    if isinstance(kernel, Packed):
        # Without the barrier XLA converts kernels once, before the loop, and reads the converted ones in it.
        own, flat = lax.optimization_barrier((kernel, x.reshape(-1, x.shape[-1])))
        made = own.times(flat, dtype or x.dtype)
        return made.reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def whole(kernel: Kernel, dtype: Any) -> Array:
    """Returns the weights of a kernel as an array, `f[K, N]`.

    Raises:
        ValueError: the kernel has an adapter for each row.
    """
    if isinstance(kernel, Adapted) and kernel.a.ndim == 3:
        raise ValueError("adapter: got one per row, which this method does not support; takes one for all rows "
                         "(decodax.adapters.apply or merge)")
    return (kernel.merged() if isinstance(kernel, Adapted) else
            kernel.values(dtype).T if isinstance(kernel, Packed) else kernel).astype(dtype)


def embedded(table: Array | Packed, which: Array, dtype: Any) -> Array:
    """Returns the rows with the indices `which` (`i32[...]`) of an embedding table `f[V, D]`: `f[..., D]`. The table
    may be packed as the kernel of a tied head; then the rows are converted to `dtype`."""
    return table.rows(which, dtype) if isinstance(table, Packed) else table[which]


def head(table: Array | Packed) -> Array | Packed:
    """Returns the kernel of the output head, `f[D, V]` or packed, of a model whose head is its embedding table, `f[V,
    D]` or packed."""
    return table if isinstance(table, Packed) else table.T
