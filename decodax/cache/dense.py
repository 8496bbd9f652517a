"""The dense key/value cache: one array a layer, slot = position, written only with verified entries.

`attend` reads what the cache holds and the window's own keys and merges the two softmax parts; `commit` writes the
window entries that a decision accepted. Layers are separate arrays, since a stacked cache costs a copy of a layer for
each layer and step on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.window import Window
from decodax.pallas_kernels.window_attention import window_attention
from decodax.struct import Struct, struct

WindowKV = Sequence[tuple[Array, Array]]
"""What a model returns for its window: for each layer keys and values `f[B, W, G, d]`, not yet in the cache."""


class Cache(Protocol):
    """What the round needs of a cache. Every kind obeys the same laws (`tests/laws`)."""

    @property
    def capacity(self) -> int:
        """Number of slots `S` of a row."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, *, scale: float,
               sliding: int | None = None, softcap: float | None = None) -> Array:
        """Attention of the window's queries `f[B, W, H, d]` to cache and window: `f[B, W, H, d]`.

        Of `window` it reads `visible()`, `positions`, `key_positions` and `cached`; an `AttentionView` has more
        keys than queries.
        """

    def commit(self, kv: WindowKV, slots: Array) -> Cache:
        """Writes window entry `w` of row `b` to slot `slots[b, w]`; -1 drops it."""

    def select(self, rows: Array) -> Cache:
        """The cache whose row `i` is this one's row `rows[i]` (`i32[B']`)."""


@struct
class Dense(Struct):
    """A contiguous cache.

    Attributes:
        keys, values: a tuple of one `f[B, G, S, d]` a layer.
        length: `i32[B]` number of verified entries; slots at and beyond it are never read.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, *, scale: float,
               sliding: int | None = None, softcap: float | None = None) -> Array:
        return window_attention(q, k, v, window.visible(), window.positions, self.keys[layer], self.values[layer],
                                self.length, scale=scale, sliding=sliding, softcap=softcap,
                                key_positions=window.key_positions, cached=window.cached)

    def commit(self, kv: WindowKV, slots: Array) -> Dense:
        if not self.capacity:
            return self
        keys = tuple(_write(cache, new, slots) for cache, (new, _) in zip(self.keys, kv, strict=True))
        values = tuple(_write(cache, new, slots) for cache, (_, new) in zip(self.values, kv, strict=True))
        return Dense(keys=keys, values=values, length=jnp.maximum(self.length, slots.max(1) + 1))

    def select(self, rows: Array) -> Dense:
        return jax.tree.map(lambda x: x[rows], self)


def dense(layers: Sequence[tuple[int, int]], batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Dense:
    """An empty cache; `layers` gives (key/value heads `G`, head width `d`) of each layer. Capacity 0 holds nothing."""
    empty = lambda: tuple(jnp.zeros((batch, heads, capacity, width), dtype) for heads, width in layers)
    return Dense(keys=empty(), values=empty(), length=jnp.zeros(batch, jnp.int32))


def _write(cache: Array, new: Array, slots: Array) -> Array:
    """Writes `new [B, W, G, d]` into `cache [B, G, S, d]` at `slots [B, W]`, dropping slots below 0."""
    new = new.astype(cache.dtype)
    # a slot below 0 would count from the end, as in NumPy; one beyond the end is dropped
    target = jnp.where(slots >= 0, slots, cache.shape[2])

    def scatter(cache: Array, new: Array) -> Array:
        return jax.vmap(lambda row, entries, at: row.at[:, at].set(entries.swapaxes(0, 1), mode="drop"))(
            cache, new, target)

    def update(cache: Array, new: Array) -> Array:
        def one(row: Array, entry: Array, slot: Array) -> Array:
            at = jnp.maximum(slot, 0)
            old = jax.lax.dynamic_slice_in_dim(row, at, 1, 1)
            return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(slot >= 0, entry[:, None], old), at, 1)

        return jax.vmap(one)(cache, new[:, 0], slots[:, 0])

    # one entry a row is the common case: on CPU an update takes a third of a scatter's time, on a TPU it becomes a
    # loop over rows (130,000 cycles for 16 by XLA's estimate) and the scatter one native operation (7,000)
    return scatter(cache, new) if new.shape[1] > 1 else jax.lax.platform_dependent(
        cache, new, cpu=update, default=scatter)
