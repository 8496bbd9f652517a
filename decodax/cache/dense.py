"""The dense key/value cache: one array a layer, slot = position, written only with verified entries.

`attend` reads what the cache holds and the window's own keys and merges the two softmax parts; `commit` writes the
window entries that a decision accepted. Layers are separate arrays, since a stacked cache costs a copy of a layer for
each layer and step on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.base import ALL, Cache, Draftable, Entries, Feature, PyTree
from decodax.cache.scratch import Scratch
from decodax.pallas_kernels.window_attention import Bias, window_attention
from decodax.struct import struct


@struct
class Dense(Cache):
    """A contiguous cache. An entry is a pair of a key `f[B, W, G, d]` and a value `f[B, W, G, e]`.

    Attributes:
        keys, values: a tuple of one `f[B, G, S, d]` and `f[B, G, S, e]` a layer.
        length: `i32[B]` number of verified entries; slots at and beyond it are never read.
        given: see `Cache.inputs`.
    """

    supports: ClassVar[frozenset[Feature]] = ALL

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array
    given: PyTree = None

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    @property
    def inputs(self) -> PyTree:
        return self.given

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        out = window_attention(q, k, v, window.visible(), window.positions, self.keys[layer], self.values[layer],
                               self.length, scale=scale, sliding=sliding, softcap=softcap,
                               key_positions=window.key_positions, cached=window.cached, bias=bias)
        own = k.shape[1] - q.shape[1]
        return out, (k[:, own:], v[:, own:])

    def commit(self, entries: Entries, slots: Array) -> Dense:
        if not self.capacity:
            return self
        keys = tuple(write(cache, new, slots) for cache, (new, _) in zip(self.keys, entries, strict=True))
        values = tuple(write(cache, new, slots) for cache, (_, new) in zip(self.values, entries, strict=True))
        return self.replace(keys=keys, values=values, length=jnp.maximum(self.length, slots.max(1) + 1))

    def scratch(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)

    def truncate(self, length: Array) -> Dense:
        return self.replace(length=jnp.minimum(self.length, length))


def dense(layers: Sequence[tuple[int, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
          inputs: PyTree = None) -> Dense:
    """An empty cache; `layers` gives (key/value heads `G`, width `d` of keys) of each layer, and the width of values as
    a third number where it is another one. Capacity 0 holds nothing."""
    empty = lambda at: tuple(jnp.zeros((batch, heads, capacity, widths[min(at, len(widths) - 1)]), dtype)
                             for heads, *widths in layers)
    return Dense(keys=empty(0), values=empty(1), length=jnp.zeros(batch, jnp.int32), given=inputs)


@jax.jit      # traced and lowered once for all layers
def write(cache: Array, new: Array, slots: Array) -> Array:
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
