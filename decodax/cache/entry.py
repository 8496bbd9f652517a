"""Entries of attention layers: what `Cache.attend` returns for a window's own nodes, and `Cache.commit` writes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct


@struct
class KVEntry(Struct):
    """Keys and values of a window's own nodes in a layer.

    Attributes:
        keys: `f[B, W, G, d]`.
        values: `f[B, W, G, e]`.
    """

    keys: Array
    values: Array

    @property
    def both(self) -> Array:
        """`f[B, W, G, d + e]`: each key, then its value, as caches store them (`KeyValues.kv`)."""
        return jnp.concatenate([self.keys, self.values], -1)

    @property
    def pair(self) -> KVEntry:
        """The keys and values alone, without what a derived entry adds; a wrapped cache takes them."""
        return KVEntry(self.keys, self.values)


@struct
class AskedEntry(KVEntry):
    """Keys, values and queries of a window's own nodes, for caches that measure attention.

    Attributes:
        queries: `f[B, W, H, d]`, scaled unless the cache says otherwise.
    """

    queries: Array

    @classmethod
    def of(cls, entry: KVEntry, queries: Array) -> AskedEntry:
        """Returns an entry with queries added."""
        return AskedEntry(entry.keys, entry.values, queries)


@struct
class MeasuredEntry(AskedEntry):
    """Keys, values, queries and softmax sums of a window's own nodes.

    Attributes:
        sums: `f32[B, W, H]`, logarithms of the softmax sums of the queries' attention.
    """

    sums: Array


def own_entry(q: Array, k: Array, v: Array) -> KVEntry:
    """Returns the keys and values of the window's own nodes, `f[B, W, G, d]` and `f[B, W, G, e]`: the last `W` of the
    `K` keys and values that `Cache.attend` gets. `q` (`f[B, W, H, d]`) gives `W`. The keys before belong to nodes of
    earlier windows."""
    earlier = k.shape[1] - q.shape[1]
    return KVEntry(k[:, earlier:], v[:, earlier:])
