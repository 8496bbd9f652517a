"""Keys as they were before they were rotated to their positions, and back.

Channels of keys are more alike from token to token before the rotation, and only there do they go together with those
of other heads and layers. Codecs that work there turn keys back, and turn them again when they are read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.rotation import rope_of, turned
from decodax.models.rope import rotate


def before_rotation(shape: KVLayer, keys: Array, start: Array) -> Array:
    """`f[G, n, d]` at positions `start` (`i32[]`) and behind, without their rotation and its factor."""
    return turned(shape, keys.swapaxes(0, 1)[None], -_positions(keys, start))[0].swapaxes(0, 1)


def after_rotation(shape: KVLayer, keys: Array, start: Array) -> Array:
    """The inverse of `before_rotation`."""
    return rotated(shape, keys.swapaxes(0, 1)[None], _positions(keys, start))[0].swapaxes(0, 1)


def rotated(shape: KVLayer, x: Array, positions: Array) -> Array:
    """`f[B, W, G, d]`, as they were before their rotation, rotated to positions `i32[B, W]`."""
    rope = rope_of(shape)
    if rope is None:
        return x
    return rotate(x, *rope.table(positions, shape.context), rope.interleaved)


def together(x: Array) -> Array:
    """`f[G, n, d]` with the heads of a token side by side, `f[n, G d]`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def apart(x: Array, heads: int) -> Array:
    """The inverse of `together`."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def _positions(keys: Array, start: Array) -> Array:
    """`i32[1, n]`."""
    return (start + jnp.arange(keys.shape[1], dtype=jnp.int32))[None]
