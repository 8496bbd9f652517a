"""SqueezeLLM (Kim et al., 2023, "SqueezeLLM: Dense-and-Sparse Quantization"): tables of values, and a few weights that
are not quantized.

Each output has a table of 8 or 16 values. They are the means of clusters of the output's weights. The importance of a
weight in its cluster is the sensitivity of the loss to it: the diagonal of the Fisher information, which is the sum
over sequences of the squared gradient of the sequence's loss. The weights to which the loss is most sensitive are not
quantized, nor are outliers, which would occupy table entries.

The authors cluster with k-means from a random start. Here the start is the best division of the sorted weights between
256 cuts, found by dynamic programming, and the weighted error is lower (see `means`).

The authors' CUDA kernels are not here. `scripts/convert.py packed` reads their `.pt` files, except those of OPT.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import free_axes, platform
from decodax.common.options import Positive, Range
from decodax.common.struct import static, struct
from decodax.models.calibration import Statistic
from decodax.models.formats.clusters import means, nearest
from decodax.models.formats.format import Format
from decodax.models.packed import DECODED, Packed, dot, for_platform, partial_sums, total

SLICES = 8
"""Number of slices of the inputs: a byte holds one bit of the codes of 8 weights, one per slice."""

ENTRIES = 16
"""Lists of exact weights are padded to a multiple of this many entries, so that they divide over devices."""


@struct
class Lookup(Packed):
    """A kernel as codes, and a table of the codes' values for each output.

    A product takes the inputs in 8 slices. The weights of a slice are chosen by selects: from the table's values by the
    first bit, from the rest by the second and so on. A CPU vectorises selects, while a gather takes weights one by one.

    Attributes:
        codes: `u8[..., N, bits * ceil(K / 8)]`. Bit `s` of byte `j` of plane `p` is bit `p` of the code of input `s *
            ceil(K / 8) + j`; the planes are concatenated. Or `u4[..., N, K]`, which a TPU reads within a product.
        table: `f[..., N, 2**bits]`.
        inputs: number of inputs `K`.
    """

    codes: Array
    table: Array
    inputs: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.inputs

    @property
    def bits(self) -> int:
        return self.table.shape[-1].bit_length() - 1

    def values(self, dtype: Any) -> Array:
        if self.codes.dtype == jnp.uint4:
            return _chosen(_bits(self.codes.astype(jnp.int32), self.bits), self.table.astype(dtype))
        slices = [self._slice(jnp.uint8(1 << s), dtype) for s in range(SLICES)]
        return jnp.concatenate(slices, -1)[..., :self.inputs]

    def times(self, x: Array, dtype: Any) -> Array:
        if platform() != "cpu" or free_axes() or len(x) == 1:
            return super().times(x, dtype)
        # Choosing takes longer than multiplying: once for all rows, and a slice of the inputs at a time.
        block = DECODED // self._width
        return self.product(x, dtype) if self.shape[0] <= block else self.by_blocks(x, dtype, block)

    def product(self, x: Array, dtype: Any) -> Array:
        if platform() != "cpu":
            wide = jnp.promote_types(x.dtype, dtype)
            return jnp.matmul(x, self.values(x.dtype).T, preferred_element_type=wide).astype(dtype)
        (R, K), N, width = x.shape, self.shape[0], self._width
        if self.codes.dtype == jnp.uint4:
            return dot(x.astype(jnp.float32), self.values(jnp.float32), dtype)
        # XLA's CPU backend has no fast half-precision products.
        slices = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, SLICES * width - K))).reshape(R, SLICES, width)

        def add(s: Array, y: Array) -> Array:
            part = lambda start, stop: self._slice(jnp.uint8(1) << s.astype(jnp.uint8), jnp.float32, start, stop)
            # Not fused: XLA would write converted kernels to memory.
            return y + lax.optimization_barrier(total(partial_sums(slices[:, s], part)) if R == 1 else
                                                dot(slices[:, s], part(0, width), jnp.float32))

        return lax.fori_loop(0, SLICES, add, jnp.zeros((R, N), jnp.float32)).astype(dtype)

    def stored(self) -> Self:
        return self.replace(codes=planes(self.codes.astype(jnp.uint8), self.bits)) \
            if self.codes.dtype == jnp.uint4 else self

    def here(self) -> Self:
        """Returns the form for this platform. XLA on TPU reads 4-bit codes once within a product, but planes eight
        times."""
        if platform() == "cpu" or self.codes.dtype == jnp.uint4:
            return self
        ones = [jnp.concatenate([(plane >> s) & 1 for s in range(SLICES)], -1) for plane in self._planes()]
        codes = functools.reduce(jnp.bitwise_or, (one << p for p, one in enumerate(ones)))
        return self.replace(codes=codes[..., :self.inputs].astype(jnp.uint4))

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        """Returns the `PartitionSpec` of each array. The codes of an output must be on one device, so a kernel sharded
        along inputs is sharded along outputs instead, and its products are gathered, not added up."""
        axis = outputs or inputs
        if axis is not None and self.shape[-2] % sizes[axis]:
            axis = None
        return jax.tree.map(lambda a: PartitionSpec(*[None] * (a.ndim - 2), axis, None), self)

    @property
    def _width(self) -> int:
        return -(-self.inputs // SLICES)

    def _planes(self, start: int = 0, stop: int | None = None) -> list[Array]:
        stop = self._width if stop is None else stop
        return [self.codes[..., first + start:first + stop] for first in range(0, self.codes.shape[-1], self._width)]

    def _slice(self, bit: Array, dtype: Any, start: int = 0, stop: int | None = None) -> Array:
        """Returns the weights `f[..., N, stop - start]` of the slice with this bit in the planes' bytes, from `start`
        to `stop`."""
        return _chosen([(plane & bit) != 0 for plane in self._planes(start, stop)], self.table.astype(dtype))


@struct
class DenseSparse(Packed):
    """The sum of a packed kernel and a sparse one.

    Attributes:
        dense: the packed kernel.
        outputs: `u16[..., P]`, or `i32[..., P]` for larger kernels: the output of each sparse weight, sorted. Padding
            entries have output `N`.
        inputs: `u16[..., P]` or `i32[..., P]`, the input of each sparse weight.
        weights: `f32[..., P]`, the sparse weights.
    """

    dense: Packed
    outputs: Array
    inputs: Array
    weights: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dense.shape

    def values(self, dtype: Any) -> Array:
        if self.outputs.ndim > 1:
            return jax.vmap(lambda one: one.values(dtype))(self)
        whole = self.dense.values(jnp.float32)
        return whole.at[self.outputs, self.inputs].add(self.weights, mode="drop").astype(dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        return self._added(self.dense.times(x, jnp.promote_types(dtype, jnp.float32)), x, dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return self._added(self.dense.product(x, jnp.promote_types(dtype, jnp.float32)), x, dtype)

    def _added(self, y: Array, x: Array, dtype: Any) -> Array:
        # One entry after the other, in the list's order: the same for any number of rows.
        parts = x.T[self.inputs].astype(jnp.float32) * self.weights[:, None]
        added = jnp.zeros(y.shape[::-1], jnp.float32).at[self.outputs].add(parts, mode="drop", indices_are_sorted=True)
        return (y + added.T).astype(dtype)

    def part(self, start: Array | int, size: int) -> Self:
        own = self.outputs.astype(jnp.int32) - start
        return self.replace(dense=self.dense.part(start, size), outputs=jnp.clip(own, 0, size),
                            weights=jnp.where(own < 0, 0, self.weights))

    def rows(self, which: Array, dtype: Any) -> Array:
        return self.values(dtype)[which]

    def placed(self, outputs: str | None, inputs: str | None) -> Self:
        return self.replace(dense=self.dense.placed(outputs, inputs))

    def stored(self) -> Self:
        return self.replace(dense=self.dense.stored())

    def here(self) -> Self:
        return self.replace(dense=self.dense.here())

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        """Returns the `PartitionSpec` of each array. The list of sparse weights may be divided anywhere: each device
        adds the contribution of its entries."""
        axis = outputs or inputs
        cut = PartitionSpec(*[None] * (self.weights.ndim - 1),
                            axis if axis is not None and self.weights.shape[-1] % sizes[axis] == 0 else None)
        return self.replace(dense=self.dense.specs(outputs, inputs, sizes), outputs=cut, inputs=cut, weights=cut)


@dataclasses.dataclass(frozen=True)
class Fisher(Statistic):
    """The diagonal of the empirical Fisher information of a kernel: `f32[K, N]`, the sum over sequences of the squared
    gradient of the sequence's loss."""

    def of(self, x: Array, gradient: Array) -> Array:
        return x.T @ gradient

    def each(self, total: Array) -> Array:
        return total * total


@dataclasses.dataclass(frozen=True)
class SqueezeLLM(Format):
    """Tables of values for the kernels of the layers, with a few weights that are not quantized. As in the authors'
    code, the head and the embeddings are not quantized either.

    Attributes:
        bits: 3 or 4, for tables of 8 or 16 values.
        sensitive: share of a kernel's weights that are not quantized because their Fisher information is largest.
        outliers: share of a kernel's weights that are not quantized because their magnitude is largest.
        spread: defines outliers as in the authors' code instead: weights whose absolute value is at least that of `q3 +
            spread * (q3 - q1)` or `q1 - spread * (q3 - q1)`, whichever is larger, where `q1` and `q3` are the kernel's
            quartiles. They use one number for the whole model, between 1.5 and 2, so that kernels with heavy tails keep
            more; try a few with `whole` until the share is as wanted. None: `outliers`.
    """

    bits: Literal[3, 4] = 3
    sensitive: Annotated[float, Range(0, 0.5, below=True)] = 0.0005
    outliers: Annotated[float, Range(0, 0.5, below=True)] = 0.004
    spread: Positive | None = None

    @property
    def statistic(self) -> Fisher:
        return Fisher()

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")

    def pack(self, kernel: Array, seen: Any = None) -> Packed:
        if seen is None:
            raise ValueError("seen: got None, takes the Fisher information of the kernel, see decodax.quantize")
        w, fisher = (np.swapaxes(np.asarray(a, np.float32), -1, -2) for a in (kernel, seen))
        for name, a in (("kernel", w), ("seen", fisher)):
            if not np.isfinite(a).all():
                raise ValueError(f"{name}: got numbers that are not finite, takes finite ones")
        *above, N, K = w.shape
        whole = np.stack([self.whole(*one) for one in zip(w.reshape(-1, N, K), fisher.reshape(-1, N, K), strict=True)])
        dense, weight = (np.where(whole, 0, a.reshape(whole.shape)).reshape(-1, K) for a in (w, fisher))
        table = means(dense, np.where(weight.any(-1, keepdims=True), weight, ~whole.reshape(-1, K)), 2**self.bits)
        # 16 bits per value, as the paper counts, unless numbers are too small or too large for them.
        with np.errstate(over="ignore"):
            half = table.astype(np.float16)
        if (np.abs(half - table) <= 2**-11 * np.abs(table).max(-1, keepdims=True)).all():
            table = half
        codes = nearest(dense, table.astype(np.float32))
        rest = w.reshape(-1, K) - np.take_along_axis(table, codes, -1)
        return assembled(codes.reshape(w.shape), table.reshape(*above, N, -1), whole.reshape(w.shape),
                         rest.reshape(w.shape))

    def whole(self, w: np.ndarray, fisher: np.ndarray) -> np.ndarray:
        """Returns `bool[N, K]`, True for the weights in `w` (`f32[N, K]`) that are not quantized."""
        found = np.zeros(w.shape, bool)
        if count := int(w.size * self.sensitive):
            # Strictly above the last of the count, as in the authors' code.
            found |= fisher > np.partition(fisher, w.size - count, axis=None)[w.size - count]
        if self.spread is not None:
            q1, q3 = np.quantile(w, (0.25, 0.75))
            return found | (np.abs(w) >= max(abs(q1 - self.spread * (q3 - q1)), abs(q3 + self.spread * (q3 - q1))))
        if count := int(w.size * self.outliers):
            found.reshape(-1)[np.argpartition(np.abs(w), w.size - count, axis=None)[w.size - count:]] = True
        return found


def assembled(codes: np.ndarray, table: np.ndarray, whole: np.ndarray, weights: np.ndarray) -> Packed:
    """Returns the packed kernel of codes `u8[..., N, K]`, tables `[..., N, 2**bits]`, and `weights` to add where
    `whole`."""
    bits, (*above, N, K) = table.shape[-1].bit_length() - 1, codes.shape
    dense = for_platform(Lookup(codes=jnp.asarray(planes(codes, bits, np)), table=jnp.asarray(table), inputs=K))
    if not whole.any():
        return dense
    each = [(*np.nonzero(where), one[where]) for where, one in zip(whole.reshape(-1, N, K), weights.reshape(-1, N, K),
                                                                   strict=True)]
    P = -(-max(len(found[0]) for found in each) // ENTRIES) * ENTRIES
    dtype = np.uint16 if max(N, K) < 1 << 16 else np.int32
    filled = [[np.pad(a, (0, P - len(a)), constant_values=fill) for a, fill in zip(found, (N, 0, 0), strict=True)]
              for found in each]
    outputs, inputs, values = (jnp.asarray(np.stack(a).reshape(*above, P), kind) for a, kind in
                               zip(zip(*filled, strict=True), (dtype, dtype, np.float32), strict=True))
    return DenseSparse(dense=dense, outputs=outputs, inputs=inputs, weights=values)


def planes(codes: Any, bits: int, np: Any = jnp) -> Any:
    """Returns codes `u8[..., K]` in the layout of `Lookup`, `u8[..., bits * ceil(K / 8)]`.

    >>> planes(jnp.array([5, 0, 0, 0, 0, 0, 0, 1, 3], jnp.uint8), 3).tolist()    # two bytes per plane
    [17, 8, 16, 0, 1, 0]
    """
    width = -(-codes.shape[-1] // SLICES)
    slices = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, SLICES * width - codes.shape[-1])])
    slices = slices.reshape(*codes.shape[:-1], SLICES, width)
    shifts = np.arange(SLICES, dtype=np.uint8)[:, None]
    return np.concatenate([(((slices >> p) & 1) << shifts).sum(-2, dtype=np.uint8) for p in range(bits)], -1)


def _bits(codes: Array, bits: int) -> list[Array]:
    return [(codes >> p) & 1 != 0 for p in range(bits)]


def _chosen(bits: list[Array], table: Array) -> Array:
    """Returns values `f[..., N, K]` of a table `f[..., N, 2**bits]` by the bits `bool[..., N, K]` of codes, low bits
    first."""
    level = [table[..., i:i + 1] for i in range(table.shape[-1])]
    for bit in bits:
        level = [jnp.where(bit, one, zero) for zero, one in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def read_tensors(tensors: Mapping[str, np.ndarray]) -> Packed:
    """Reads a kernel of the authors' checkpoints.

    Args:
        tensors: by their names there. "qweight", `i32[K / 32 * bits, N]`: the codes of an output as one string of bits,
            low ones first. "lookup_table", `f[N, 2**bits]`. A kernel with a sparse part has "rows", "cols" and "vals",
            `i32[N + 1]`, `i32[P]` and `f[P]`, by rows (CSR), and, as in their fastest kernel, some of its rows as dense
            ones: "full_rows" and "full_row_indices", `f[K, n]` and `i32[n]`.

    Raises:
        ValueError: the shapes of the tensors do not fit together.
    """
    qweight, table = tensors["qweight"], tensors["lookup_table"]
    (words, N), bits = qweight.shape, table.shape[-1].bit_length() - 1
    if bits not in (3, 4) or table.shape != (N, 2**bits):
        raise ValueError(f"lookup_table: got shape {table.shape}, takes ({N}, 8) or ({N}, 16)")
    if words % bits:
        raise ValueError(f"qweight: got {words} words an output, takes a multiple of {bits}")
    K = words // bits * 32
    string = np.unpackbits(np.ascontiguousarray(qweight.T.astype("<i4")).view(np.uint8), axis=-1, bitorder="little")
    codes = np.packbits(string.reshape(N, K, bits), axis=-1, bitorder="little")[..., 0]
    sparse = np.zeros((N, K), np.float32)
    if "vals" in tensors:
        rows, cols, vals = (tensors[name] for name in ("rows", "cols", "vals"))
        if rows.shape != (N + 1,) or cols.shape != vals.shape or rows[-1] != len(vals):
            raise ValueError(f"rows, cols, vals: got shapes {rows.shape}, {cols.shape} and {vals.shape}, takes those "
                             f"of a sparse [{N}, {K}] matrix by rows")
        np.add.at(sparse, (np.repeat(np.arange(N), np.diff(rows)), cols), vals.astype(np.float32))
    if "full_rows" in tensors:
        np.add.at(sparse, tensors["full_row_indices"], tensors["full_rows"].T.astype(np.float32))
    return assembled(codes, table, sparse != 0, sparse)
