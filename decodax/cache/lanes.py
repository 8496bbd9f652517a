"""Entries in whole tiles of a TPU's memory.

A TPU stores the last axis of an array in tiles of 128 lanes. If it is no multiple of 128, such as the 576 channels of
DeepSeek's latents, XLA gives an argument another order of axes, with less padding. But attention and commits take
entries as the shape has them, so the whole cache would be copied at the beginning and the end of each call, into an
array with padding. With zeros after each entry, the argument is that array. Only the default cache and `paged` have
them, and only on TPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer
from decodax.common.axes import platform
from decodax.pallas_kernels.window_attention import prefix_attention, window_attention

LANES = 128
"""Number of lanes of a TPU's tile."""


def paddings(layers: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """Returns the number of zeros after each entry, for each layer: none except on TPUs. `layers` has a `KVLayer` for
    each layer, or a tuple of its first fields. Entries with a choice of keys have none: it reads their end."""
    if platform() != "tpu":
        return (0,) * len(layers)
    return tuple(0 if shape.chooses else -shape.both % LANES for shape in (KVLayer(*layer) for layer in layers))


def pad(x: Array, count: int) -> Array:
    """Returns an array whose last axis is longer by `count` zeros at its end."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, count),)) if count else x


def stored(entry: KVEntry, kv: Array) -> Array:
    """Returns keys and values of a window, `f[B, W, G, D]`, as the cache `kv`, `f[..., D]`, stores them."""
    return pad(entry.both, kv.shape[-1] - entry.keys.shape[-1] - entry.values.shape[-1])


def attend_padded(q: Array, k: Array, v: Array, window: Any, kv: Array, length: Array, **options: Any) -> Array:
    """Returns `window_attention` of a window to itself and to a cache `kv`, whose entries may have zeros at their end.
    With latents (`e = 0`) zeros are added to queries and keys, otherwise to values."""
    more = kv.shape[3] - k.shape[3] - v.shape[3]
    q, k, v = (pad(q, more), pad(k, more), v) if v.shape[3] == 0 else (q, k, pad(v, more))
    out = window_attention(q, k, v, window.visible(), window.positions, kv, length,
                           key_positions=window.key_positions, cached=window.cached, **options)
    return out[..., :out.shape[3] - more] if more else out


def attend_padded_cache(q: Array, positions: Array, kv: Array, length: Array, padding: int,
                        **options: Any) -> tuple[Array, Array]:
    """Returns `prefix_attention` to a cache `kv` with `padding` zeros after its entries."""
    latents = kv.shape[3] == q.shape[3] + padding
    out, lse = prefix_attention(pad(q, padding if latents else 0), positions, kv, length, **options)
    return out[..., :out.shape[3] - padding] if padding else out, lse
