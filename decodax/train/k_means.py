"""K-means of weighted points on the host, started from k-means++ (Arthur and Vassilvitskii, 2007)."""

from __future__ import annotations

import numpy as np

PART = 1 << 20
"""Maximum number of distances that are in memory at a time."""


def k_means(x: np.ndarray, weights: np.ndarray, count: int, loops: int, random: np.random.Generator) -> np.ndarray:
    """Returns the centroids of points, `f64[count, c]`. If there are at most `count` distinct points, these are
    returned, and the last one is repeated.

    Args:
        x: points, `f64[N, c]`.
        weights: weights of the points, `f64[N]`.
        count: number of centroids.
        loops: maximum number of iterations.
        random: source of the initial centroids.
    """
    weights = np.maximum(weights, weights.max() * 1e-12) if weights.max() > 0 else np.ones(len(x))
    points, index = np.unique(x, axis=0, return_inverse=True)
    mass = np.bincount(index.ravel(), weights, len(points))
    if len(points) <= count:
        return np.concatenate([points, points[-1:].repeat(count - len(points), 0)])
    centres: np.ndarray = np.empty((count, x.shape[1]))
    centres[0] = points[random.choice(len(points), p=mass / mass.sum())]
    near = np.square(points - centres[0]).sum(1)
    for i in range(1, count):
        p = near * mass
        centres[i] = points[random.choice(len(points), p=p / p.sum())]
        near = np.minimum(near, np.square(points - centres[i]).sum(1))
    return lloyd(points, mass, centres, loops)


def lloyd(points: np.ndarray, mass: np.ndarray, centres: np.ndarray, loops: int) -> np.ndarray:
    """Returns the centers `f64[count, c]` after Lloyd's iteration: each moves to the weighted mean of the points
    nearest to it, until none moves or `loops` iterations are done.

    Args:
        points: `f64[N, c]`.
        mass: weights of the points, `f64[N]`.
        centres: initial centers, `f64[count, c]`.
        loops: maximum number of iterations.
    """
    for _ in range(loops):
        parts = np.array_split(points, -(-points.shape[0] * len(centres) // PART))
        of = np.concatenate([(np.square(centres).sum(1) - 2 * part @ centres.T).argmin(1) for part in parts])
        total = np.bincount(of, mass, len(centres))
        sums = np.stack([np.bincount(of, mass * x, len(centres)) for x in points.T], 1)
        new = np.where(total[:, None] > 0, sums / np.maximum(total[:, None], 1e-300), centres)
        if np.array_equal(new, centres):
            break
        centres = new
    return centres
