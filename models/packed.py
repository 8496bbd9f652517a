"""Kernels that are kept in fewer bits than they are multiplied in.

A step of decoding reads each weight once and multiplies it with a few rows, so its time is the time to read the
weights. A `Packed` kernel takes the place of an array in a model's weights; `multiply` is all that a network needs to
know of it.

XLA converts a packed kernel within a product on a TPU or GPU; for groups of inputs with scales of their own it does not
on a TPU, which has `packed_matmul` for them.

On CPU it would write the converted kernel to memory, or add up the inputs of an output one after the other, since the
order of additions is not its own to change; which of both depends on its version. So for one row the program spells out
sums that are vectors: `partial_sums` cuts the inputs of a kernel into slices of one width, converts each slice and adds
its products to those of the others, entry by entry, and `total` adds up the few sums that are left of an output. More
rows are multiplied by XLA's own product, with a block of outputs converted at a time that is small enough to stay in
the processor's own memory; their sums are rounded in another order than that of one row, as with arrays.
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
"""On CPU, slices of the inputs have a multiple of this width."""

SLICES = 15
"""On CPU, the most slices of inputs that share their scales: XLA computes what more slices than that are cut from
by itself, and writes it to memory."""

BLOCK = 1 << 20
"""On CPU, weights that are converted at a time for several rows. 8 rows and 2,048 x 768 in int8 take 0.37 ms so and
0.46 with a quarter of it, in float32 0.37 (JAX 0.12, kernels that are in no cache)."""

DECODED = 1 << 18
"""On CPU, weights that are converted at a time by formats whose weights take longer to decode than to multiply."""

SUMS = 1 << 18
"""On CPU, partial sums of one row that are written at a time."""


class Packed(Struct, abc.ABC):
    """A kernel of `K` inputs and `N` outputs, or one for each of `E` experts. Its arrays are `[N, ...]` or
    `[E, N, ...]`: what belongs to an output lies together."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(..., N, K)`."""

    @property
    def converts(self) -> bool:
        """Whether there is anything to convert; where not, XLA multiplies the kernel as it lies."""
        return True

    @abc.abstractmethod
    def values(self, dtype: Any) -> Array:
        """The kernel as `f[..., N, K]`."""

    @abc.abstractmethod
    def product(self, x: Array, dtype: Any) -> Array:
        """`f[R, N]` in `dtype` from `x`, `f[R, K]`. For large `R` it is called with a block of outputs at a time."""

    def times(self, x: Array, dtype: Any) -> Array:
        """`f[R, N]` in `dtype` from `x`, `f[R, K]`."""
        if platform() != "cpu" or free_axes():
            return self.product(x, dtype)
        N, K = self.shape
        if self.by_sums(x):
            x, block = _made(x), SUMS // slices(K)[0]
            return self.product(x, dtype) if N < 2 * block else self.by_blocks(x, dtype, block)
        if N == 1 or not self.converts:
            return self.product(x, dtype)
        return self.by_blocks(x, dtype, BLOCK // K + 1)

    def by_sums(self, x: Array) -> bool:
        """Whether `product` multiplies by `partial_sums`: one row, on CPU, by weights that are converted."""
        return platform() == "cpu" and not free_axes() and len(x) == 1 and self.converts

    def by_blocks(self, x: Array, dtype: Any, block: int) -> Array:
        """As `times`, with the weights of `block` outputs converted at a time. `N` is 2 or more."""
        N = self.shape[0]
        block = min(block, N // 2)          # two blocks at least: XLA takes a loop of one apart
        count = N // block

        def one(i: Array) -> Array:
            own, i = lax.optimization_barrier((self, i))    # else XLA converts the whole in front of the loop
            return own.part(i * block, block).product(x, dtype)

        made = lax.map(one, jnp.arange(count, dtype=jnp.int32)).transpose(1, 0, 2).reshape(len(x), -1)
        if rest := N - count * block:
            made = jnp.concatenate([made, self.part(N - rest, rest).product(x, dtype)], 1)
        return made

    def part(self, start: Array | int, size: int) -> Self:
        """`size` outputs from `start`."""
        return jax.tree.map(lambda a: _as_bits(lambda b: lax.dynamic_slice_in_dim(b, start, size), a), self)

    def rows(self, which: Array, dtype: Any) -> Array:
        """The rows `f[..., K]` of outputs `which`, `i32[...]`: embeddings, of a table that is also the head."""
        return jax.tree.map(lambda a: _as_bits(lambda b: b[which], a), self).values(dtype)

    def placed(self, outputs: str | None, inputs: str | None) -> Self:
        """The same for a mesh over whose axes it will lie as `specs` says."""
        return self

    def stored(self) -> Self:
        """The same as it is saved, for every platform and mesh."""
        return self

    def here(self) -> Self:
        """What was `stored`, as this platform multiplies it. It is called under jit."""
        return self

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        """A `PartitionSpec` for each array, on a mesh with axes of the given sizes."""
        def one(a: Array) -> PartitionSpec:
            last = inputs if inputs is not None and a.shape[-1] % sizes[inputs] == 0 else None
            return PartitionSpec(*[None] * (a.ndim - 2), outputs, last)

        return jax.tree.map(one, self)


def dot(x: Array, kernel: Array, dtype: Any) -> Array:
    """`x @ kernel.T`: `f[R, N]` from `f[R, K]` and `f[N, K]`, as it is fastest on the platform.

    Args:
        kernel: what is converted already.
        dtype: of the result.
    """
    if platform() != "cpu":
        return jnp.matmul(x, kernel.T, preferred_element_type=dtype)
    # the other way round, XLA writes the kernel once more, transposed
    return lax.dot_general(kernel, x, (((1,), (1,)), ((), ()))).T.astype(dtype)


def slices(K: int, group: int | None = None) -> tuple[int, list[tuple[int, int]]]:
    """How `K` inputs are cut: the width of slices, and of each where it starts and how many of its first inputs are
    those of the slice before.

    Args:
        group: inputs that have a scale of their own. A slice has inputs of one group, or whole groups of less than
            `LANES`.

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
    """The product of a row and a kernel on CPU, as sums whose `total` it is.

    Args:
        x: `f32[1, K]`.
        part: the kernel's inputs from a start to a stop, `f32[N, stop - start]`. It cuts codes before it converts them.
        scales: `f32[N, groups]`, of each group of inputs; None: 1.
        group: see `slices`; default that of `scales`.

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
    """`f32[R, N]` from `partial_sums`, whose entries are added up in an order that does not depend on the program."""
    made = lax.optimization_barrier(sums)       # else XLA computes them again for each addition
    made = jnp.pad(made, ((0, 0), (0, 0), (0, -made.shape[-1] % 8)))
    made = functools.reduce(jnp.add, [made[..., i:i + 8] for i in range(0, made.shape[-1], 8)])
    while made.shape[-1] > 1:
        half = made.shape[-1] // 2
        made = made[..., :half] + made[..., half:]
    return made[..., 0].T


def _made(x: Array) -> Array:
    """`x`, written to memory: XLA fuses what makes it into the product, and computes it again for each output. No
    fusion goes through a conditional. What its other branch does, the product of a NaN does anyway."""
    some = x.reshape(-1)[0]
    return lax.cond(some == some, lambda: x, lambda: x.at[0].set(jnp.nan))


def _as_bits(take: Callable[[Array], Array], a: Array) -> Array:
    """`take(a)`, which takes some entries of an array. XLA's CPU takes those of floats of less than 32 bits by way of a
    copy of the whole in a wider dtype, made in front of the loop."""
    bits = a.dtype.itemsize * 8
    if platform() != "cpu" or bits >= 32 or not jnp.issubdtype(a.dtype, jnp.floating):
        return take(a)
    return lax.bitcast_convert_type(take(lax.bitcast_convert_type(a, f"uint{bits}")), a.dtype)


@struct
class Adapted(Struct):
    """A kernel with a product of low rank beside it, `kernel + a @ b` (LoRA, Hu et al., 2021).

    Attributes:
        kernel: `f[K, N]`, or packed.
        a, b: `f[K, r]` and `f[r, N]`; of several adapters side by side `f[A, K, r]` and `f[A, r, N]`, of which `chosen`
            takes each row's.
        by_row: the leading axis is that of the batch.
    """

    kernel: Array | Packed
    a: Array
    b: Array
    by_row: bool = static(default=False)

    def chosen(self, which: Array) -> Adapted:
        """For rows of the adapters `which`, `i32[B]`."""
        return self.replace(a=self.a[which], b=self.b[which], by_row=True)

    def times(self, x: Array, dtype: Any) -> Array:
        """`f[..., N]` from `x`, `f[..., K]`, or `f[B, W, K]` with an adapter for each row."""
        if self.a.ndim == 3 and not (self.by_row and x.ndim == 3):
            raise ValueError("adapter: rows have adapters of their own, which this method does not read; takes "
                             "one for all rows (decodax.adapters.apply or merge)")
        low = jnp.matmul(x, self.a.astype(x.dtype))
        more = jnp.matmul(low, self.b.astype(x.dtype), preferred_element_type=dtype)
        return multiply(x, self.kernel, dtype) + more

    def merged(self) -> Array:
        """`f[K, N]`: the sum, in float32."""
        whole = self.kernel.values(jnp.float32).T if isinstance(self.kernel, Packed) else self.kernel
        return whole.astype(jnp.float32) + jnp.matmul(self.a, self.b, preferred_element_type=jnp.float32)


Kernel = Array | Packed | Adapted
"""What multiplies the inputs of a layer: `f[K, N]`, the same packed, or adapted."""


def multiply(x: Array, kernel: Kernel, dtype: Any = None) -> Array:
    """`x @ kernel`: `f[..., N]` from `f[..., K]`.

    Args:
        dtype: of the result; default that of `x`.
    """
    if isinstance(kernel, Adapted):
        return kernel.times(x, dtype or x.dtype)
    if isinstance(kernel, Packed):
        # without the barrier XLA converts kernels once, in front of the loop, and reads the converted ones in it
        own, flat = lax.optimization_barrier((kernel, x.reshape(-1, x.shape[-1])))
        made = own.times(flat, dtype or x.dtype)
        return made.reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def embedded(table: Array | Packed, which: Array, dtype: Any) -> Array:
    """Rows `f[..., D]` of an embedding table `f[V, D]`, which is packed as the kernel of the head that it also is."""
    return table.rows(which, dtype) if isinstance(table, Packed) else table[which]


def head(table: Array | Packed) -> Array | Packed:
    """The kernel of a head that is the embedding table."""
    return table if isinstance(table, Packed) else table.T
