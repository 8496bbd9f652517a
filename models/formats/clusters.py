"""Weighted k-means of numbers on a line, for tables of values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

CUTS = 256
"""Number of parts of an output's sorted weights in the first clustering; with at most as many weights it is optimal."""

ROUNDS = 50
"""Largest number of rounds of k-means, as in the authors' code; 1 to 10 are usual."""

ROWS = 64
"""Number of outputs whose clusters are found at a time by one compiled program."""

WEIGHTS = 1 << 22
"""Number of weights that are sorted at a time."""


def nearest(w: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest table entry for each weight, `u8[N, K]`, from weights `f[N, K]` and sorted
    tables `f[N, count]`."""
    codes = np.zeros(w.shape, np.uint8)
    for i in range(table.shape[-1] - 1):
        codes += w > (table[:, i:i + 1] + table[:, i + 1:i + 2]) / 2
    return codes


def means(w: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Returns the sorted means of `count` clusters of each output's weights, `f32[N, count]`, with a small weighted
    squared error.

    Clusters of numbers are intervals. They are first built optimally from up to `CUTS` parts of the sorted weights
    (Wang and Song, 2011, "Ckmeans.1d.dp"); then k-means runs until nothing changes. The parts are narrow where a good
    division has narrow intervals: they have equal shares of `weight**(1/3) * gap**(2/3)` (Panter and Dite, 1951).

    On 64 outputs of 768 random weights, the weighted error is 0.91 (normal, 3 bits), 0.90 (normal, 4 bits) and 0.87
    (Student's t with 3 degrees of freedom, 4 bits) of that of the authors' `sklearn.cluster.KMeans`, and at most 1.0003
    of the optimum.

    Args:
        w: `f32[N, K]`, the weights.
        weight: `f32[N, K]`, their importance, not all 0 in an output.
        count: number of clusters.
    """
    found = np.empty((len(w), count), np.float32)
    several = max(WEIGHTS // w.shape[1], 1)
    for start in range(0, len(w), several):
        found[start:start + several] = _means(w[start:start + several], weight[start:start + several], count)
    return found


def _means(w: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    (N, K), order = w.shape, np.argsort(w, -1)
    v, f = (np.take_along_axis(a, order, -1).astype(np.float64) for a in (w, weight))
    f /= f.sum(-1, keepdims=True)
    centre = (f * v).sum(-1, keepdims=True)
    v -= centre         # so that differences of sums keep their precision
    mass, moment = (np.concatenate([np.zeros((N, 1)), np.cumsum(a, -1)], -1) for a in (f, f * v))
    at = _start(v, f, mass, moment, count)
    ends = np.zeros((N, 1), np.int64), np.full((N, 1), K)
    for _ in range(ROUNDS):
        bounds = np.concatenate([ends[0], at, ends[1]], -1)
        m, s = (np.diff(np.take_along_axis(a, bounds, -1)) for a in (mass, moment))
        mean = np.where(m > 0, s / np.where(m > 0, m, 1), np.nan)
        # An empty cluster gets the mean of one beside it.
        mean = np.fmin.accumulate(np.fmax.accumulate(mean, -1)[:, ::-1], -1)[:, ::-1]
        at, last = _search(v, (mean[:, 1:] + mean[:, :-1]) / 2), at
        if (at == last).all():
            break
    return mean + centre


def _start(v: np.ndarray, f: np.ndarray, mass: np.ndarray, moment: np.ndarray, count: int) -> np.ndarray:
    """Returns the ends of clusters, `i[N, count - 1]`, among sorted weights `f64[N, K]`."""
    N, K = v.shape
    if K <= CUTS:
        edges = np.broadcast_to(np.arange(K + 1), (N, K + 1))
    else:
        share = np.cumsum(np.cbrt(f * np.diff(v, axis=-1, prepend=v[:, :1])**2), -1)
        inner = _search(share, share[:, -1:] * np.arange(1, CUTS) / CUTS)
        edges = np.concatenate([np.zeros((N, 1), np.int64), inner, np.full((N, 1), K)], -1)
    a, b = (np.take_along_axis(sums, edges, -1) for sums in (mass, moment))
    b /= np.maximum(np.abs(b).max(-1, keepdims=True), np.finfo(np.float32).tiny)
    blocks = [np.pad(each, ((0, -N % ROWS), (0, 0))).astype(np.float32).reshape(-1, ROWS, edges.shape[1])
              for each in (a, b)]
    cuts = np.concatenate([_divide(*block, count) for block in zip(*blocks, strict=True)])[:N]
    return np.take_along_axis(edges, cuts, -1)


@functools.partial(jax.jit, static_argnums=2)
def _divide(mass: Array, moment: Array, count: int) -> Array:
    """Divides points optimally into `count` intervals, by dynamic programming. Returns `i32[n, count - 1]`, the first
    point of each interval after the first one.

    Args:
        mass: `f32[n, C]`, sums of the points' weights up to each of `C - 1` cuts and the end.
        moment: `f32[n, C]`, the same for weights times values.
        count: number of intervals.
    """
    def one(sums: tuple[Array, Array]) -> Array:
        mass, moment = sums
        width = mass - mass[:, None]
        # gain[from, to]: the amount by which an interval lowers the sum of squares.
        gain = jnp.where(width > 0, (moment - moment[:, None])**2 / jnp.where(width > 0, width, 1), 0)
        gain = jnp.where(jnp.tri(len(mass), dtype=bool).T, gain, -jnp.inf)
        best = [gain[0]]        # for each number of intervals, by the end of the last one
        for _ in range(count - 1):
            best.append((best[-1][:, None] + gain).max(0))
        end, found = jnp.int32(len(mass) - 1), []
        for before in best[-2::-1]:
            end = jnp.argmax(before + gain[:, end]).astype(jnp.int32)
            found.append(end)
        return jnp.stack(found[::-1])

    return lax.map(one, (mass, moment))


def _search(v: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns for each row the number of entries of `v` (`f[N, K]`) that are at most `at` (`f[N, n]`), by bisection."""
    low, high = np.zeros(at.shape, np.int64), np.full(at.shape, v.shape[-1])
    for _ in range(v.shape[-1].bit_length()):
        middle = (low + high) // 2
        right = (middle < high) & (np.take_along_axis(v, np.minimum(middle, v.shape[-1] - 1), -1) <= at)
        low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
    return low
