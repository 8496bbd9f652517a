"""The dense key/value cache: one array for each layer, in which the slot of a token is its position.

`attend` computes attention to the cached keys and to the window's own keys, and merges the two parts of the softmax.
`commit` writes the accepted entries of a window; nothing else is ever written. The layers are separate arrays, since
with one array for all layers, each step would copy every layer on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from decodax.cache.entry import KVEntry, own_entry
from decodax.cache.key_values import KeyValues, empty_kv, key_widths
from decodax.cache.lanes import attend_padded, attend_padded_cache, pad, paddings, stored
from decodax.common.axes import DATA, MODEL, shardwise
from decodax.common.struct import static, struct
from decodax.core.cache import ALL, Entries, Feature, PyTree
from decodax.core.capabilities import AttendsAlone, LoadsPrefix, Truncates
from decodax.pallas_kernels.window_attention import Bias

BLOCK = 32
"""Number of slots that are moved at a time when rows are copied to other rows (`Dense.select`)."""


@struct
class Dense(KeyValues, LoadsPrefix, AttendsAlone, Truncates):
    """A contiguous cache. An entry is a pair of a key `f[B, W, G, d]` and a value `f[B, W, G, e]`.

    Attributes:
        kv: a tuple with one array `f[B, G, S, d + e]` for each layer: in each slot a key, then its value, and on TPUs
            perhaps zeros (`decodax.cache.lanes`).
        length: `i32[B]`, number of verified entries; attention ignores slots from `length` on.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        padding: static; the number of zeros after an entry of each layer; (): none.
    """

    supports: ClassVar[frozenset[Feature]] = ALL

    kv: tuple[Array, ...]
    length: Array
    given: PyTree = None
    widths: tuple[int, ...] = static(default=())
    padding: tuple[int, ...] = static(default=())

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        out = attend_padded(q, k, v, window, self.kv[layer], self.length, scale=scale, sliding=sliding, softcap=softcap,
                            bias=bias, sinks=sinks)
        return out, own_entry(q, k, v)

    def attend_cached(self, layer: int, q: Array, window: Any, *, scale: float) -> tuple[Array, Array]:
        return attend_padded_cache(q, window.positions, self.kv[layer], self.length, self.padded(layer), scale=scale)

    def commit(self, entries: Entries, slots: Array) -> Dense:
        if not self.capacity:
            return self
        kv = write_entries(self.kv, entries, slots)
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def select(self, rows: Array) -> Dense:
        # as many rows as there are move where they lie, block by block as far as the longest row, and not at all if
        # each row goes on from itself
        if not self.capacity or rows.shape != self.length.shape:
            return super().select(rows)
        block = BLOCK if self.capacity % BLOCK == 0 else self.capacity
        stays = (rows == jnp.arange(rows.shape[0], dtype=rows.dtype)).all()
        blocks = jnp.where(stays, 0, -(-self.length.max() // block)).astype(jnp.int32)

        def move(i: Array, kv: tuple[Array, ...]) -> tuple[Array, ...]:
            of = lambda x: jax.lax.dynamic_slice_in_dim(x, i * block, block, 2)
            return tuple(jax.lax.dynamic_update_slice_in_dim(x, of(x)[rows], i * block, 2) for x in kv)

        return self.replace(kv=jax.lax.fori_loop(jnp.int32(0), blocks, move, self.kv), length=self.length[rows],
                            given=jax.tree.map(lambda x: x[rows], self.given))

    def load_prefix(self, kv: Sequence[Array], length: Array, reuse: tuple[Array, Array] | None = None) -> Dense:
        put = lambda held, new: jax.lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), 0, 2)
        return self.replace(kv=tuple(map(put, self.kv, kv)), length=length)

    def truncate(self, length: Array) -> Dense:
        return self.replace(length=jnp.minimum(self.length, length))


def dense(layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
          inputs: PyTree = None) -> Dense:
    """Returns an empty dense cache, on TPUs with entries in whole tiles.

    Args:
        layers: for each layer a `KVLayer`, or a tuple of its first fields: the number of key/value heads, the width of
            keys, and the width of values if it is another one.
        batch: number of rows.
        capacity: number of positions. 0: the cache stores nothing.
        dtype: dtype of keys and values.
        inputs: inputs of each row beside its tokens; see `Cache.inputs`.
    """
    made, padding = unpadded(layers, batch, capacity, dtype, inputs), paddings(layers)
    return made.replace(kv=tuple(map(pad, made.kv, padding)), padding=padding) if any(padding) else made


def unpadded(layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
             inputs: PyTree = None) -> Dense:
    """Returns an empty dense cache with entries of `d + e` channels on all platforms, for code that reads its arrays.
    The arguments are those of `dense`."""
    return Dense(kv=empty_kv(layers, batch, capacity, dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
                 widths=key_widths(layers))


@jax.jit      # traced and lowered once for all layers
def dense_like(cache: Any) -> Dense:
    """Returns an empty dense cache for the rows, layers and texts of `cache`, which has the fields `kv` and `shapes`:
    the cache of its prefill."""
    return unpadded(cache.shapes, cache.length.shape[0], cache.capacity, cache.kv[0].dtype, cache.inputs)


def write(cache: Array, new: Array, slots: Array) -> Array:
    """Returns `cache` (`f[B, G, S, D]`) with `new[b, w]` (`new` is `f[B, W, G, D]`) written to slot `slots[b, w]`
    (`i32[B, W]`) of row `b`. A slot out of range, such as -1, drops the entry."""
    rows, heads = P(DATA), P(DATA, MODEL)
    return shardwise(_write, (heads, P(DATA, None, MODEL), rows), heads, cache, new, slots)


def write_entries(kv: Sequence[Array], entries: Entries, slots: Array) -> tuple[Array, ...]:
    """Returns the keys and values `kv` of all layers with those of each layer's entry, a `KVEntry`, written; see
    `write`.

    Raises:
        TypeError: an entry is something else.
    """
    for layer, entry in enumerate(entries):
        if not isinstance(entry, KVEntry):
            raise TypeError(f"entries: got a {type(entry).__name__} for layer {layer}, takes a decodax.cache.KVEntry")
    return tuple(write(held, stored(entry, held), slots) for held, entry in zip(kv, entries, strict=True))


def _write(cache: Array, new: Array, slots: Array) -> Array:
    B, G, S, D = cache.shape
    new = new.astype(cache.dtype)
    # a negative slot would count from the end, as in NumPy; a slot beyond the end is dropped
    target = jnp.where(slots >= 0, slots, S)

    def scatter(cache: Array, new: Array) -> Array:
        # over rows and heads as one: a TPU scatters into `[B, G, S, D]` in another layout than attention reads, and
        # would copy the whole cache into that and back in each call
        at = jnp.broadcast_to(target[:, None], (B, G, new.shape[1])).reshape(B * G, -1)
        row = jnp.arange(B * G, dtype=jnp.int32)[:, None]
        entries = new.swapaxes(1, 2).reshape(B * G, -1, D)
        return cache.reshape(B * G, S, D).at[row, at].set(entries, mode="drop").reshape(cache.shape)

    def update(cache: Array, new: Array) -> Array:
        def one(row: Array, entry: Array, slot: Array) -> Array:
            at = jnp.maximum(slot, 0)
            old = jax.lax.dynamic_slice_in_dim(row, at, 1, 1)
            held = (slot >= 0) & (slot < S)
            return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(held, entry[:, None], old), at, 1)

        return jax.vmap(one)(cache, new[:, 0], slots[:, 0])

    def by_slot(cache: Array, new: Array) -> Array:     # all heads of an entry at once
        one = lambda row, entries, at: row.at[:, at].set(entries.swapaxes(0, 1), mode="drop")
        return jax.vmap(one)(cache, new, target)

    # one entry a row is the common case: on CPU an update takes a third of a scatter's time, on a TPU it becomes a
    # loop over rows (130,000 cycles for 16 by XLA's estimate) and the scatter one native operation (7,000)
    return jax.lax.platform_dependent(cache, new, cpu=update if new.shape[1] == 1 else by_slot, default=scatter)
