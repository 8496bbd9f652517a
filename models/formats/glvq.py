"""Grouped lattice vector quantization (Zhang, Wu, Wang and Lin, 2025; arXiv:2510.20984).

The inputs of a kernel are divided into groups. Each group has its own lattice, a generation matrix `G` of `d x d`, and
a curvature `mu`. `d` consecutive weights of an output are a vector `w`, stored as `d` integers `z`:

    z = clip(round(G^-1 F(w))),   w' = F^-1(G z),   F(w) = sign(w) ln(1 + mu |w|) / ln(1 + mu)

which is Babai's rounding (1986) after a companding function. `G` starts as the Cholesky factor of the covariance of the
group's companded vectors. Then the codes are rounded and a step of gradient descent for `G` and `mu` is taken in turn,
on the squared error `|W X - W' X|^2` of the group's outputs on calibration data. The number of bits of a code, the same
throughout a group, depends on the group's salience ("SDBA", from SliM-LLM: Huang et al., 2024).

The authors have published no code. Details that the paper leaves open are decided here as follows.

- Codes of `b` bits are the half-integers from `-(2^b - 1) / 2` to `(2^b - 1) / 2`, so that the points are symmetric
  about zero with 1 and 2 bits too: the lattice is shifted by half the sum of its basis.
- The Cholesky factor is scaled for the code's range by the one of `lattices.WIDTHS` with the smallest error.
- The error is divided by `|W X|^2`, and the penalty on `G - G0` by `|G0|^2`, so that one rate and one penalty suit all
  kernels. Steps are Adam's, for `ln mu` in place of `mu`. Singular values of `G` stay within those of `G0` widened by
  `lattices.WIDER`. The iterate with the smallest loss is kept.
- Salience is `w^2 / u^2` as in SliM-LLM's code, with `u` the diagonal of the Cholesky factor of the inverse of `X X^T`.
  The number of groups with one bit more, and of as many with one bit less, minimises the error of the initial lattices,
  in place of the divergence of the outputs, which `X X^T` does not determine.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import free_axes, platform
from decodax.common.options import Count, NonNegative, Range, Whole
from decodax.common.struct import static, struct
from decodax.models.calibration import Statistic
from decodax.models.formats.format import Format
from decodax.models.formats.lattices import expand, learn, salience, start_errors
from decodax.models.packed import DECODED, Packed

DAMPING = 0.01
"""Share of the mean of the diagonal of `X X^T` that is added to it, as in GPTQ (Frantar et al., 2022)."""


@struct
class Lattice(Packed):
    """A packed kernel whose weights are stored as codes of lattice points.

    Attributes:
        codes: `u8[..., planes, N, size // 8]`, a plane for each bit of a group's codes. The lowest bits of all groups
            come first, groups with more bits first, then the next bits of the groups that have them. Bit `j` of byte
            `i` belongs to input `j * size // 8 + i` of the group.
        lattices: `f16[..., groups, d, d]`, the generation matrix of each group.
        curvatures: `f16[..., groups]`, `mu` of each group.
        scales: `f16[..., N]`, scale of each output; None: all are 1.
        bits: number of bits of each group's codes.
        inputs: number of inputs `K`; the last group is padded with zeros.
    """

    codes: Array
    lattices: Array
    curvatures: Array
    scales: Array | None
    bits: tuple[int, ...] = static()
    inputs: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        *above, _, N, _ = self.codes.shape
        return *above, N, self.inputs

    def values(self, dtype: Any) -> Array:
        groups = self._groups(jnp.promote_types(jnp.float32, dtype))
        own = jnp.moveaxis(groups[..., np.argsort(_order(self.bits)), :, :], -3, -2)        # [..., N, groups, size]
        whole = own.reshape(*own.shape[:-2], -1)[..., :self.inputs]
        return (whole if self.scales is None else whole * self.scales[..., None].astype(whole.dtype)).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        # XLA's CPU backend has no fast half-precision products.
        own = jnp.dtype(jnp.float32) if platform() == "cpu" else x.dtype
        kernel = self._groups(jnp.float32).astype(own)
        size = kernel.shape[-1]
        split = _divided(x.astype(own), size)[:, np.array(_order(self.bits))]
        parts = jnp.einsum("rgk,gnk->grn", split, kernel, preferred_element_type=jnp.promote_types(jnp.float32, dtype))
        y = parts.sum(0)
        return (y if self.scales is None else y * self.scales.astype(y.dtype)).astype(dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        # Decoding a weight takes longer than multiplying it: all rows at once, and no more weights than fit in the
        # cache.
        if free_axes() or self.shape[0] < 2:
            return self.product(x, dtype)
        return self.by_blocks(x, dtype, DECODED // self.inputs + 1)

    def part(self, start: Array | int, size: int) -> Self:
        scales = None if self.scales is None else lax.dynamic_slice_in_dim(self.scales, start, size)
        return self.replace(codes=lax.dynamic_slice_in_dim(self.codes, start, size, axis=-2), scales=scales)

    def rows(self, which: Array, dtype: Any) -> Array:
        flat = which.reshape(-1)
        own = self.replace(codes=self.codes[:, flat], scales=None if self.scales is None else self.scales[flat])
        return own.values(dtype).reshape(*which.shape, -1)

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        above = [None] * (self.codes.ndim - 3)
        return self.replace(codes=PartitionSpec(*above, None, outputs, None), lattices=PartitionSpec(),
                            curvatures=PartitionSpec(),
                            scales=None if self.scales is None else PartitionSpec(*above, outputs))

    def _groups(self, dtype: Any) -> Array:
        """Returns the weights `f[..., groups, N, size]`, groups with more bits first."""
        order = np.array(_order(self.bits))
        bits = np.array(self.bits)[order]
        *above, _, _, eighth = self.codes.shape
        shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
        codes: Array | None = None
        start = 0
        for level in range(int(bits[0])):
            count = int((bits > level).sum())
            plane = self.codes[..., start:start + count, :, :]
            own = (((plane[..., None, :] >> shifts) & 1) << level).reshape(*plane.shape[:-1], 8 * eighth)
            start += count
            codes = own if codes is None else codes | jnp.pad(
                own, [(0, 0)] * len(above) + [(0, len(bits) - count), (0, 0), (0, 0)])
        assert codes is not None
        middle = (2.0 ** bits - 1) / 2
        vectors = codes.astype(dtype) - jnp.asarray(middle, dtype)[:, None, None]
        d = self.lattices.shape[-1]
        points = jnp.einsum("...gvj,...gij->...gvi", vectors.reshape(*above, len(bits), -1, d),
                            self.lattices[..., order, :, :].astype(dtype), preferred_element_type=dtype)
        return expand(points.reshape(vectors.shape), self.curvatures[..., order, None, None].astype(dtype))


def _order(bits: tuple[int, ...]) -> list[int]:
    """Returns the indices of the groups, with those that have more bits first."""
    return sorted(range(len(bits)), key=lambda g: -bits[g])


def _divided(x: Array, size: int) -> Array:
    """Divides inputs `f[..., K]` into groups `f[..., groups, size]`, the last one padded with zeros."""
    groups = -(-x.shape[-1] // size)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * size - x.shape[-1])])
    return padded.reshape(*x.shape[:-1], groups, size)


@dataclasses.dataclass(frozen=True)
class GroupInputs(Statistic):
    """Computes `X X^T` for each group of a kernel's inputs, `f32[groups, size, size]`, for the calibration of `GLVQ`.

    Rows whose gradient is zero are left out.

    Attributes:
        group: maximum number of inputs in a group.
        multiple: the size of a group is a multiple of this.
    """

    group: int
    multiple: int

    def of(self, x: Array, gradient: Array) -> Array:
        own = _divided(jnp.where((gradient != 0).any(-1, keepdims=True), x, 0),
                       group_size(x.shape[-1], self.group, self.multiple))
        return jnp.einsum("rgi,rgj->gij", own, own)


def group_size(K: int, group: int, multiple: int) -> int:
    """Returns the number of inputs in a group for `K` inputs: at most `group`, a multiple of `multiple`, and equal for
    all groups.

    >>> group_size(768, 128, 8), group_size(320, 128, 8), group_size(33, 128, 8)
    (128, 112, 40)
    """
    return -(-K // (-(-K // group) * multiple)) * multiple


@dataclasses.dataclass(frozen=True)
class GLVQ(Format):
    """Stores weights as codes of points of lattices that are learned for each group of inputs.

    Attributes:
        bits: average number of bits of a weight's code, 1 to 7.
        group: maximum number of inputs in a group, a multiple of 8 and of `dimension`. The groups of a kernel have
            equal size.
        dimension: dimension `d` of the lattices.
        spread: number of bits by which salient groups have more and others less, 1 or 0; 0 gives all groups the same
            ("GLVQ-u").
        scales: True divides each output's weights by their root mean square relative to that of the kernel, stored as
            float16. This is not in the paper, and helps if some outputs are much larger than others.
        steps: maximum number of learning steps; 0 keeps the initial lattices.
        rate: step size of Adam's first step, relative to `2^(bits - 2)`, for `G` divided by its largest singular value
            and for `ln mu`. It falls to 0 as a cosine.
        penalty: weight lambda of the distance from the initial lattice.
        tolerance: learning ends when the relative change of the loss is smaller than this.
    """

    bits: Annotated[int, Range(1, 7)] = 2
    group: Count = 128
    dimension: Annotated[int, Range(1, 64)] = 8
    spread: Annotated[int, Range(0, 1)] = 1
    scales: bool = False
    steps: Whole = 100
    rate: NonNegative = 0.03
    penalty: NonNegative = 1e-4
    tolerance: NonNegative = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits <= self.spread:
            raise ValueError(f"spread: got {self.spread} with {self.bits} bits, takes 0: a code has at least one bit")
        if self.group % self._multiple:
            raise ValueError(f"group: got {self.group}, takes a multiple of {self._multiple}, that is, of 8 and of "
                             f"dimension {self.dimension}")

    @property
    def _multiple(self) -> int:
        return math.lcm(8, self.dimension)

    @property
    def statistic(self) -> GroupInputs:
        return GroupInputs(self.group, self._multiple)

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")

    def pack(self, kernel: Array, seen: Any = None) -> Lattice:
        *above, K, N = kernel.shape
        size = group_size(K, self.group, self._multiple)
        rows, scales = jnp.swapaxes(kernel, -1, -2).astype(jnp.float32), None
        if self.scales:
            squares = (rows ** 2).mean(-1)
            relative = jnp.sqrt(squares / jnp.maximum(squares.mean(-1, keepdims=True), 1e-30))
            scales = jnp.where(relative < 1e-3, 1, relative).astype(jnp.float16)
            rows = rows / scales[..., None].astype(jnp.float32)
        own = _divided(rows, size)
        w = jnp.moveaxis(own, -2, -3).reshape(-1, own.shape[-2], N, size)       # [E or 1, groups, N, size]
        moments = _damped(jnp.asarray(seen, jnp.float32).reshape(len(w), -1, size, size))
        bits = self._allocated(w, moments)
        codes, lattices, curvatures = learn(w, moments, jnp.asarray(bits, jnp.float32), self.dimension, self.steps,
                                            self.rate, self.penalty, self.tolerance)
        found = (bit_planes(codes, bits), lattices, curvatures)
        codes, lattices, curvatures = found if above else (a[0] for a in found)
        return Lattice(codes=codes, lattices=lattices, curvatures=curvatures, scales=scales, bits=bits, inputs=K)

    def _allocated(self, w: Array, moments: Array) -> tuple[int, ...]:
        """Returns the number of bits of each group's codes. All experts have the same, since their codes are in one
        array."""
        groups = w.shape[1]
        if not self.spread or groups < 2:
            return (self.bits,) * groups
        rank = np.argsort(np.asarray(salience(w, moments).sum(0)))      # the least salient first
        fewer, same, more = (np.asarray(start_errors(w, moments, self.bits + i, self.dimension).sum(0))
                             for i in (-1, 0, 1))
        totals = [fewer[rank[:n]].sum() + same[rank[n:groups - n]].sum() + more[rank[groups - n:]].sum()
                  for n in range(groups // 2 + 1)]
        count, bits = int(np.argmin(totals)), np.full(groups, self.bits)
        bits[rank[:count]] -= 1
        bits[rank[groups - count:]] += 1
        return tuple(int(b) for b in bits)


def _damped(moments: Array) -> Array:
    """Adds `DAMPING` times its mean to the diagonal of `X X^T`, or 1 for a kernel without data."""
    mean = jnp.trace(moments, axis1=-2, axis2=-1)[..., None, None] / moments.shape[-1]
    return moments + jnp.where(mean > 0, DAMPING * mean, 1) * jnp.eye(moments.shape[-1])


def bit_planes(codes: Array, bits: tuple[int, ...]) -> Array:
    """Returns codes as bits in the layout of `Lattice.codes`, `u8[E, planes, N, size // 8]`.

    Args:
        codes: `u8[E, groups, N, size]`, one code for each weight, by group of `size` inputs.
        bits: number of bits of each group's codes.
    """
    order = np.array(_order(bits))
    shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
    found = []
    for level in range(max(bits)):
        own = codes[:, order[np.array(bits)[order] > level]]
        ones = ((own >> level) & 1).reshape(*own.shape[:-1], 8, -1)
        found.append((ones << shifts).sum(-2, dtype=jnp.uint8))
    return jnp.concatenate(found, 1)
