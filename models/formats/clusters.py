"""Clusters of numbers on a line by weighted k-means, for tables of values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

CUTS = 256
"""Parts of an output's sorted weights that a first cluster is made of; an output of as many weights has the optimum."""

ROUNDS = 50
"""The most rounds of k-means, as in the authors' code; 1 to 10 are usual."""

ROWS = 64
"""Outputs whose clusters are found at a time by one compiled program."""

WEIGHTS = 1 << 22
"""Weights that are sorted at a time."""


def nearest(w: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The codes `u8[N, K]` of weights `f[N, K]` by sorted tables `f[N, count]`."""
    codes = np.zeros(w.shape, np.uint8)
    for i in range(table.shape[-1] - 1):
        codes += w > (table[:, i:i + 1] + table[:, i + 1:i + 2]) / 2
    return codes


def means(w: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """The sorted means `f32[N, count]` of clusters of each output's weights, such that `sum(weight * (w - mean)**2)` of
    the nearest means is small.

    Clusters of numbers are intervals. First they are made of up to `CUTS` parts of the sorted weights, at best (Wang
    and Song, 2011, "Ckmeans.1d.dp"); then k-means runs until nothing changes. The parts are narrow where a good
    division has narrow intervals: they have equal shares of `weight**(1/3) * gap**(2/3)` (Panter and Dite, 1951).

    On 64 outputs of 768 random weights the weighted error is 0.91 (normal, 3 bits), 0.90 (normal, 4 bits) and 0.87
    (Student's t with 3 degrees of freedom, 4 bits) of that of the authors' `sklearn.cluster.KMeans`, and at most 1.0003
    of the optimum.

    Args:
        w: `f32[N, K]`. weight: `f32[N, K]`, not all 0 in an output.
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
    v -= centre         # else differences of sums have few digits
    mass, moment = (np.concatenate([np.zeros((N, 1)), np.cumsum(a, -1)], -1) for a in (f, f * v))
    at = _start(v, f, mass, moment, count)
    ends = np.zeros((N, 1), np.int64), np.full((N, 1), K)
    for _ in range(ROUNDS):
        bounds = np.concatenate([ends[0], at, ends[1]], -1)
        m, s = (np.diff(np.take_along_axis(a, bounds, -1)) for a in (mass, moment))
        mean = np.where(m > 0, s / np.where(m > 0, m, 1), np.nan)
        # a cluster of nothing has the mean of one beside it
        mean = np.fmin.accumulate(np.fmax.accumulate(mean, -1)[:, ::-1], -1)[:, ::-1]
        at, last = _search(v, (mean[:, 1:] + mean[:, :-1]) / 2), at
        if (at == last).all():
            break
    return mean + centre


def _start(v: np.ndarray, f: np.ndarray, mass: np.ndarray, moment: np.ndarray, count: int) -> np.ndarray:
    """Where clusters end, `i[N, count - 1]`, among sorted weights `f64[N, K]`."""
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
    """The best division of points into `count` intervals, by dynamic programming: `i32[n, count - 1]`, where all but
    the first begin.

    Args:
        mass, moment: `f32[n, C]`, sums of the points' weights, and of their weighted places, up to each of `C - 1`
            cuts and the end.
    """
    def one(sums: tuple[Array, Array]) -> Array:
        mass, moment = sums
        width = mass - mass[:, None]
        # [from, to]: by how much an interval lowers the sum of squares
        gain = jnp.where(width > 0, (moment - moment[:, None])**2 / jnp.where(width > 0, width, 1), 0)
        gain = jnp.where(jnp.tri(len(mass), dtype=bool).T, gain, -jnp.inf)
        best = [gain[0]]        # by the end of the last interval, for each number of them
        for _ in range(count - 1):
            best.append((best[-1][:, None] + gain).max(0))
        end, found = jnp.int32(len(mass) - 1), []
        for before in best[-2::-1]:
            end = jnp.argmax(before + gain[:, end]).astype(jnp.int32)
            found.append(end)
        return jnp.stack(found[::-1])

    return lax.map(one, (mass, moment))


def _search(v: np.ndarray, at: np.ndarray) -> np.ndarray:
    """`np.searchsorted(side="right")` of each row: how many of `f[N, K]` are at most `f[N, n]`."""
    low, high = np.zeros(at.shape, np.int64), np.full(at.shape, v.shape[-1])
    for _ in range(v.shape[-1].bit_length()):
        middle = (low + high) // 2
        right = (middle < high) & (np.take_along_axis(v, np.minimum(middle, v.shape[-1] - 1), -1) <= at)
        low, high = np.where(right, middle + 1, low), np.where(right, high, middle)
    return low
