"""Kernels that are kept in fewer bits than they are multiplied in.

A step of decoding reads each weight once and multiplies it with a few rows, so its time is the time to read the
weights. A `Packed` kernel takes the place of an array in a model's weights; `multiply` is all that a network needs to
know of it.

XLA converts a packed kernel within a product on a TPU or GPU; for groups of inputs with scales of their own it does not
on a TPU, which has `packed_matmul` for them. On CPU it does so, at the memory's speed, only in a
product of one row of less than 16 KB, whose kernel lies as `[outputs, inputs]`; else it first writes the whole
converted kernel to memory (32,000 x 768 in int8, 8 rows: 38 ms, and 6 for float32). So there a few rows are multiplied
one by one, and more of them block by block, each block small enough to stay in the processor's own memory.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.axes import free_axes, platform
from decodax.struct import Struct, static, struct

ROWS = 8
"""On CPU, up to so many rows are multiplied one by one. A round of the 125M shape with 8 rows in int8 takes 26 to 35 ms
so, 44 to 54 by blocks, and 35 to 41 in float32."""

BLOCK = 1 << 18
"""On CPU, weights that are converted at a time for more rows."""

OUTPUTS = 256
"""On CPU, outputs that a few rows are multiplied by at a time where nothing is to be converted: of a whole kernel that
lies as `[N, K]` XLA writes a transposed copy to memory. A round of the 125M shape with 8 rows takes 43 ms so, 39 by
blocks; a window of 8, 42 and 37."""

INPUTS = 2048
"""On CPU, inputs of a row that are multiplied at a time."""


class Packed(Struct, abc.ABC):
    """A kernel of `K` inputs and `N` outputs, or one for each of `E` experts. Its arrays are `[N, ...]` or
    `[E, N, ...]`: what belongs to an output lies together."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(..., N, K)`."""

    @property
    def converts(self) -> bool:
        """Whether there is anything to convert; where not, the kernel lies as one row is multiplied fastest on CPU."""
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
        if len(x) <= (ROWS if self.converts else 1):
            return self._one_by_one(_made(x), dtype)
        N, K = self.shape
        if N == 1 or (len(x) > 4 * ROWS and not self.converts):
            return self.product(x, dtype)
        return self.by_blocks(x, dtype, BLOCK // K + 1 if self.converts else OUTPUTS)

    def by_blocks(self, x: Array, dtype: Any, block: int) -> Array:
        """As `times`, with the weights of `block` outputs converted at a time. `N` is 2 or more."""
        N = self.shape[0]
        block = min(block, N // 2)          # two blocks at least: XLA takes a loop of one apart
        count = N // block

        def one(i: Array) -> Array:
            return self.part(i * block, block).product(x, dtype)

        made = lax.map(one, jnp.arange(count, dtype=jnp.int32)).transpose(1, 0, 2).reshape(len(x), -1)
        if rest := N - count * block:
            made = jnp.concatenate([made, self.part(N - rest, rest).product(x, dtype)], 1)
        return made

    def _one_by_one(self, x: Array, dtype: Any) -> Array:
        # without the barrier XLA fuses products with what follows, and then writes converted kernels to memory
        return jnp.concatenate(lax.optimization_barrier([self.product(x[i:i + 1], dtype) for i in range(len(x))]))

    def part(self, start: Array | int, size: int) -> Self:
        """`size` outputs from `start`."""
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), self)

    def rows(self, which: Array, dtype: Any) -> Array:
        """The rows `f[..., K]` of outputs `which`, `i32[...]`: embeddings, of a table that is also the head."""
        return jax.tree.map(lambda a: _gathered(a, which), self).values(dtype)

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
        dtype: of the result.
    """
    if platform() != "cpu":
        return jnp.matmul(x, kernel.T, preferred_element_type=dtype)
    if len(x) > 1:      # the other way round, XLA writes the kernel once more, transposed
        return lax.dot_general(kernel, x, (((1,), (1,)), ((), ()))).T.astype(dtype)
    parts = [x[:, i:i + INPUTS] @ kernel[:, i:i + INPUTS].T for i in range(0, x.shape[1], INPUTS)]
    if len(parts) > 1:      # not fused, see `Packed.times`
        parts = lax.optimization_barrier(parts)
    return functools.reduce(jnp.add, parts).astype(dtype)


def _made(x: Array) -> Array:
    """`x`, written to memory: XLA fuses what makes it into the product, and computes it again for each output. No
    fusion goes through a conditional. What its other branch does, the product of a NaN does anyway."""
    some = x.reshape(-1)[0]
    return lax.cond(some == some, lambda: x, lambda: x.at[0].set(jnp.nan))


def _gathered(a: Array, which: Array) -> Array:
    """`a[which]`. XLA's CPU gathers half precision by way of a float32 copy of the whole, made in front of the loop."""
    if platform() != "cpu" or a.dtype not in (jnp.bfloat16, jnp.float16):
        return a[which]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.uint16)[which], a.dtype)


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
