"""R-Sparse: rank-aware activation sparsity (Zhang, Liu, Tian, Khaitan, Wang and Li, 2025).

Large inputs of a kernel are multiplied with it, small ones with a few of its singular components:

    y = x_S W_S + (x_rest V_r) U_r

An input is large if its magnitude times the norm of its weights exceeds a threshold, which is calibrated to keep a
given share of the inputs. Each row of a batch and each node of a window has its own set `S`, determined by its own
inputs alone. So a result does not depend on other rows and nodes, and speculative decoding gives the tokens of plain
decoding.

For a token, the share `1 - sparsity` of the kernel's memory is read. `ratio` is the part of that share for large
inputs; the singular components get the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import free_axes, platform
from decodax.common.options import Range, Share
from decodax.common.struct import struct
from decodax.models.calibration import Statistic
from decodax.models.formats.format import Format
from decodax.models.packed import Packed, dot

LOWEST, HIGHEST = -24, 16
"""Magnitudes are counted from `2**LOWEST` to `2**HIGHEST`; those beyond are counted in the last bin."""

OCTAVE = 8
"""Number of bins per factor of two. Within a bin the logarithms of magnitudes are assumed to be uniform."""

AT_ONCE = 16
"""On CPU, number of inputs of a single row whose weights are read in one step of a loop. 8 to 64 take the same time; so
do two loops over halves of the inputs."""

RATIOS = tuple(i / 20 for i in range(21))
"""Ratios that `RSparse` chooses from."""


@struct
class RankSparse(Packed):
    """A kernel that is multiplied only with large inputs, and a low-rank approximation of its products with small ones.

    Attributes:
        kernel: `f[..., K, N]`. The weights of an input are adjacent, since they are read or skipped together.
        limits: `f32[..., K]`. An input is large if its magnitude is above this; NaNs are large.
        down: `f[..., r, K]`; None: small inputs are left out.
        up: `f[..., N, r]`. `up @ down` is the best approximation of rank `r` of the transposed kernel.
    """

    kernel: Array
    limits: Array
    down: Array | None = None
    up: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *above, K, N = self.kernel.shape
        return *above, N, K

    def values(self, dtype: Any) -> Array:
        """Returns the whole kernel, of which products use only the rows of large inputs."""
        return jnp.swapaxes(self.kernel, -1, -2).astype(dtype)

    @property
    def converts(self) -> bool:
        return False

    def product(self, x: Array, dtype: Any) -> Array:
        # XLA's CPU backend has no fast half-precision products.
        own = jnp.dtype(jnp.float32) if platform() == "cpu" else x.dtype
        wide = jnp.promote_types(own, dtype)
        large, x = self.large(x), x.astype(own)
        if platform() == "cpu" and not free_axes() and len(x) == 1:
            y = skipping(x[0], large[0], self.kernel)[None]
        else:
            y = jnp.matmul(jnp.where(large, x, 0), self.kernel.astype(own), preferred_element_type=wide)
        if self.down is not None and self.up is not None:
            few = dot(jnp.where(large, 0, x), self.down.astype(own), own)
            y = y + dot(few, self.up.astype(own), wide)
        return y.astype(dtype)

    def large(self, x: Array) -> Array:
        """Returns `bool[R, K]`, True for the inputs of each row that are multiplied with the kernel."""
        return ~(jnp.abs(x.astype(jnp.float32)) <= self.limits)

    def part(self, start: Array | int, size: int) -> Self:
        up = None if self.up is None else lax.dynamic_slice_in_dim(self.up, start, size, -2)
        return self.replace(kernel=lax.dynamic_slice_in_dim(self.kernel, start, size, -1), up=up)

    def rows(self, which: Array, dtype: Any) -> Array:
        return self.kernel.T[which].astype(dtype)

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        *experts, N, K = self.shape
        above = [None] * len(experts)
        n = outputs if outputs is not None and N % sizes[outputs] == 0 else None
        k = inputs if inputs is not None and K % sizes[inputs] == 0 else None
        made = self.replace(kernel=PartitionSpec(*above, k, n), limits=PartitionSpec(*above, k))
        if self.down is None:
            return made
        return made.replace(down=PartitionSpec(*above, None, k), up=PartitionSpec(*above, n, None))


def skipping(x: Array, large: Array, kernel: Array) -> Array:
    """Returns the product `f[N]` of the large inputs among `x` (`f[K]`) with the kernel `f[K, N]`.

    Weights of other inputs are not read, except those that pad the last `AT_ONCE`.
    """
    K, N = kernel.shape
    slots = jnp.arange(-(-K // AT_ONCE) * AT_ONCE, dtype=jnp.int32)
    before = jnp.cumsum(large.astype(jnp.int32))
    which = jnp.minimum(jnp.searchsorted(before, slots + 1, method="scan_unrolled").astype(jnp.int32), K - 1)
    inputs = jnp.where(slots < before[-1], x[which], 0)

    def some(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, y = carry
        places, factors = (lax.dynamic_slice(a, (i,), (AT_ONCE,)) for a in (which, inputs))
        for place, factor in zip(places, factors, strict=True):
            y = y + lax.dynamic_slice(kernel, (place, 0), (1, N))[0].astype(x.dtype) * factor
        return i + AT_ONCE, y

    return lax.while_loop(lambda carry: carry[0] < before[-1], some, (jnp.int32(0), jnp.zeros(N, x.dtype)))[1]


@dataclasses.dataclass(frozen=True)
class Magnitudes(Statistic):
    """The histogram of the magnitudes of each of the `K` inputs of a kernel, `f32[K, bins]`, with `OCTAVE` bins per
    factor of two from `2**LOWEST` to `2**HIGHEST`."""

    def of(self, x: Array, gradient: Array) -> Array:
        bins = (HIGHEST - LOWEST) * OCTAVE
        place = jnp.clip((jnp.log2(jnp.abs(x)) - LOWEST) * OCTAVE, 0, bins - 1).astype(jnp.int32)
        used = (gradient != 0).any(-1).astype(jnp.float32)      # leaves out the blocks' padding rows
        counts = jnp.zeros((x.shape[1], bins), jnp.float32)
        return counts.at[jnp.arange(x.shape[1]), place].add(used[:, None])


@dataclasses.dataclass(frozen=True)
class RSparse(Format):
    """R-Sparse with calibrated thresholds.

    The authors find the ratios of Llama 3 8B's kernels by an evolutionary search that runs the model repeatedly (and
    most of them turn out to be 1). Here `ratio=None` takes for each kernel the ratio in `RATIOS` with the smallest
    expected squared error of products on the data, assuming that small inputs are uncorrelated with zero mean. This
    error is a sum over inputs: the mean square of the input where it is small, times the squared norm of the difference
    between its weights and those in `up @ down`.

    Attributes:
        sparsity: share of a kernel that is not read for a token; 0.5 in the paper.
        ratio: part of the read share that is spent on large inputs, from 0 to 1. With 1, inputs are large by their
            magnitudes alone, as in the authors' code; otherwise by their magnitudes times the norms of their weights.
            None: chosen for each kernel.
    """

    sparsity: Annotated[float, Range(0, 1, below=True)] = 0.5
    ratio: Share | None = None

    @property
    def statistic(self) -> Magnitudes:
        return Magnitudes()

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")

    def rank(self, K: int, N: int, ratio: float) -> int:
        """Returns the number of singular components for a kernel of `K` inputs and `N` outputs."""
        if ratio == 1:
            return 0
        read = 1 - self.sparsity
        return int((K * N * read - int(K * read * ratio) * N) / (K + N))

    def pack(self, kernel: Array, seen: Any = None) -> RankSparse:
        K, N = kernel.shape[-2:]
        counts = np.asarray(seen, np.float64).reshape(-1, K, seen.shape[-1])
        # An expert without data gets the limits of all experts.
        reached = np.where(counts.any((1, 2), keepdims=True), counts, counts.sum(0))
        squares = (np.asarray(kernel, np.float64)**2).sum(-1).reshape(-1, K)
        # kernel = left @ right
        left, right = _components(kernel) if self.ratio != 1 else (kernel[..., :0], kernel[..., :0, :])
        held = (np.asarray(left, np.float64)**2).reshape(*squares.shape, -1).cumsum(-1)     # of the first components
        held = np.concatenate([np.zeros((*squares.shape, 1)), held], -1)
        ratios = RATIOS if self.ratio is None else (self.ratio,)
        small = {ratio: 1 - (1 - self.sparsity) * ratio for ratio in ratios}
        weighed = dict(zip(ratios, limits_of(reached, np.sqrt(squares), list(small.values())), strict=True))
        if 1 in ratios:
            weighed[1], = limits_of(reached, np.ones_like(squares), [small[1]])
        error = lambda ratio: (np.maximum(squares - held[..., self.rank(K, N, ratio)], 0)
                               * small_squares(counts, weighed[ratio])).sum()
        ratio = min(ratios, key=error)
        rank = self.rank(K, N, ratio)
        made = RankSparse(kernel, jnp.asarray(weighed[ratio], jnp.float32).reshape(kernel.shape[:-1]))
        if not rank:
            return made
        down, up = (jnp.swapaxes(a, -1, -2).astype(kernel.dtype) for a in (left[..., :rank], right[..., :rank, :]))
        return made.replace(down=down, up=up)


def _components(kernel: Array) -> tuple[Array, Array]:
    """Returns `f[..., K, c]` and `f[..., c, N]`, whose product is the kernel, largest singular components first."""
    left, sizes, right = jnp.linalg.svd(kernel.astype(jnp.float32), full_matrices=False)
    return left * sizes[..., None, :], right


def limits_of(counts: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Returns the threshold of each input's magnitude, `f[shares, E, K]`, at which it times its weight reaches the
    threshold of its expert.

    The threshold of an expert is such that the given share of these products is below it.

    Args:
        counts: `f[E, K, bins]`, see `Magnitudes`.
        weights: `f[E, K]`.
        shares: the shares.
    """
    logs = np.log2(np.maximum(weights, 1e-30))      # an input with zero weights is small
    starts = logs[..., None] + LOWEST + np.arange(counts.shape[-1]) / OCTAVE
    made = []
    for count, start in zip(counts, starts, strict=True):
        some = count > 0
        count, start = count[some], start[some]
        # The sum of the bins' densities rises where a bin begins and falls where one ends.
        at = np.concatenate([start, start + 1 / OCTAVE])
        order = np.argsort(at)
        at, density = at[order], np.concatenate([count, -count])[order].cumsum() * OCTAVE
        below = np.concatenate([[0], (density[:-1] * np.diff(at)).cumsum()])
        made.append([np.inf if share == 1 else np.interp(share * below[-1], below, at) for share in shares])
    return 2**(np.array(made).T[..., None] - logs)


def small_squares(counts: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Returns the sum of squares of the magnitudes below the limits `f[E, K]`, for each input, `f[E, K]`, from
    histograms `f[E, K, bins]`."""
    bins = counts.shape[-1]
    squares = counts * 4**(LOWEST + (np.arange(bins) + 0.5) / OCTAVE)
    sums = np.concatenate([np.zeros((*limits.shape, 1)), squares.cumsum(-1)], -1)
    place = np.clip((np.log2(limits) - LOWEST) * OCTAVE, 0, bins)
    below = np.minimum(place.astype(int), bins - 1)[..., None]
    whole, part = (np.take_along_axis(a, below, -1)[..., 0] for a in (sums, squares))
    return whole + (place - below[..., 0]) * part
