"""Rotary embeddings of cached keys and of queries: functions that move rotated vectors to other positions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.models.rope import Rope, rotate


def rope_of(shape: KVLayer) -> Rope | None:
    """Returns the rotary embedding of a layer, or None if the layer has none.

    Raises:
        ValueError: the layer counts positions within chunks (dual chunk attention), so that a key cannot be moved from
            one position to another.
    """
    rope: Rope | None = shape.rope
    if rope is not None and rope.chunks is not None:
        raise ValueError("cache: takes a model without dual chunk attention: its positions are counted within chunks, "
                         "so keys cannot be rotated to other positions")
    return rope


def turned(shape: KVLayer, x: Array, by: Array) -> Array:
    """Rotates `x` (`f[B, W, H, d]`) by `i32[B, W]` positions, and divides it by the square of the rotation's scale
    (YaRN).

    If `by` is minus the positions of rotated and scaled queries or keys, the result is their value before rotation.
    """
    rope = rope_of(shape)
    if rope is None:
        return x
    cos, sin = rope.table(by, shape.context)
    factor = (cos ** 2 + sin ** 2)      # the square of the scale
    return rotate(x, cos / factor, sin / factor, rope.interleaved)


def moved(shape: KVLayer, x: Array, by: Array) -> Array:
    """Moves rotated queries or keys (`f[B, W, H, d]`) by `i32[B, W]` positions. Their scale (YaRN) does not change."""
    rope = rope_of(shape)
    if rope is None:
        return x
    cos, sin = rope.table(by, shape.context)
    factor = jnp.sqrt(cos ** 2 + sin ** 2)
    return rotate(x, cos / factor, sin / factor, rope.interleaved)


def mean_turn(shape: KVLayer, x: Array, positions: Array) -> Array:
    """Rotates `x` (`f[..., d]`) by each of the angles of `positions` (`i32[n]`), and returns the mean of the `n`
    results, `f[..., d]`."""
    rope = rope_of(shape)
    if rope is None:
        return x
    cos, sin = (t[0, :, 0].mean(0) for t in rope.table(positions[None], shape.context))
    return rotate(x, cos, sin, rope.interleaved)


def rotated(shape: KVLayer, x: Array, positions: Array) -> Array:
    """Rotates `x` (`f[B, W, G, d]`), which is not rotated yet, to positions `i32[B, W]`."""
    rope = rope_of(shape)
    if rope is None:
        return x
    return rotate(x, *rope.table(positions, shape.context), rope.interleaved)


def before_rotation(shape: KVLayer, keys: Array, start: Array) -> Array:
    """Removes the rotation, and its scale, of keys `f[G, n, d]` at positions `start` (`i32[]`), `start + 1`, ...

    Without their rotation the channels of keys vary less from token to token, and correlate with those of other heads
    and layers. Some codecs encode keys in this form.
    """
    return turned(shape, keys.swapaxes(0, 1)[None], -_consecutive(keys, start))[0].swapaxes(0, 1)


def after_rotation(shape: KVLayer, keys: Array, start: Array) -> Array:
    """Applies the rotation that `before_rotation` removes, with its scale. The arguments have the same meaning."""
    return rotated(shape, keys.swapaxes(0, 1)[None], _consecutive(keys, start))[0].swapaxes(0, 1)


def _consecutive(keys: Array, start: Array) -> Array:
    """Returns the positions of the keys, `i32[1, n]`."""
    return (start + jnp.arange(keys.shape[1], dtype=jnp.int32))[None]
