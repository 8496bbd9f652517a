"""Positions of encoder-decoders: a bias of scores by distance, or vectors that are added to the embeddings.

Everything is computed from the positions of nodes, not from their places in the window, so it is right for the nodes of
draft trees.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.models.encoder_decoder.config import RelativePositions, Sinusoids


def sinusoids(own: Sinusoids, width: int, positions: Array) -> Array:
    """Returns the vectors of positions `i32[...]`: `f32[..., width]`, sines in the first half of the channels."""
    frequencies = 10_000.0 ** (-np.arange(width // 2, dtype=np.float64) / own.steps)
    angles = (positions + own.offset)[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def relative_bias(own: RelativePositions, weights: Array, queries: Array, keys: Array, *, both: bool) -> Array:
    """Returns the bias of the scores, `f32[B, H, W, K]`.

    Args:
        own: the buckets.
        weights: `f[buckets, H]`.
        queries: positions of queries; see `decodax.pallas_kernels.window_attention.by_position`.
        keys: positions of keys.
        both: True if queries attend to later keys, too, as in an encoder.
    """
    by_distance = weights.astype(jnp.float32)[_buckets(own.buckets, own.farthest, both)]
    distance = jnp.clip(keys - queries, -own.farthest, own.farthest) + own.farthest
    return by_distance[distance, jnp.arange(weights.shape[1])[:, None, None]]


@functools.lru_cache(maxsize=16)
def _buckets(buckets: int, farthest: int, both: bool) -> np.ndarray:
    """Returns the bucket of each distance (key position minus query position) from `-farthest` to `farthest`.

    Near distances have a bucket each, the others share buckets by their logarithm. With `both`, later keys have
    separate buckets.
    """
    distance = np.arange(-farthest, farthest + 1)
    count = buckets // 2 if both else buckets
    exact = count // 2
    far = np.abs(distance) if both else np.maximum(-distance, 0)
    # In float32 as in transformers: some distances lie exactly between two buckets.
    logarithm = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(farthest / exact)) * np.float32(count - exact)
    found = np.where(far < exact, far, np.minimum(exact + logarithm.astype(np.int32), count - 1))
    return (found + count * (both & (distance > 0))).astype(np.int32)
