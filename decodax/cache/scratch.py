"""A buffer for the nodes of a draft tree, which is expanded level by level.

Entries of unverified nodes are not written into the cache. They are kept in this buffer, and read under an ancestor
mask, until it is decided which of them are accepted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache, Entries
from decodax.core.capabilities import Draftable
from decodax.core.window import Window


@struct
class AttentionView(Struct):
    """A window that has more keys than queries, for `Cache.attend`.

    Attributes:
        positions: `i32[B, W]`. key_positions: `i32[B, K]`. seen: `bool[B, W, K]`. cached: as in `Window`.
        tokens: `i32[B, W]`. before: entries of the layer, `[B, K - W, ...]`, of the nodes before the window's own. Both
            are None if keys do not correspond to nodes one by one.
    """

    positions: Array
    key_positions: Array
    seen: Array
    cached: Array | None = None
    tokens: Array | None = None
    before: Any = None

    @property
    def is_prefill(self) -> bool:
        """As in `Window`: never."""
        return False

    def visible(self) -> Array:
        return self.seen


@struct
class Scratch(Draftable):
    """A cache of keys and values with room for tree nodes.

    Attributes:
        base: cache of the verified text, whose entries are tuples that begin with keys and values.
        entries: entries of the nodes in each layer, `[B, room, ...]`. positions: `i32[B, room]`.
        sees: `bool[B, W, room]`, the nodes that the queries of the next window see; None before `seen_by`.
    """

    base: Any
    entries: tuple[Any, ...]
    positions: Array
    sees: Array | None = None

    @classmethod
    def empty(cls, base: Cache, entries: Entries, room: int) -> Scratch:
        """Returns a buffer for `room` nodes. `entries`: of any window, for the shapes."""
        zeros = lambda x: jnp.zeros((x.shape[0], room, *x.shape[2:]), x.dtype)
        batch = jax.tree.leaves(entries)[0].shape[0]
        return cls(base=base, entries=jax.tree.map(zeros, tuple(entries)),
                   positions=jnp.zeros((batch, room), jnp.int32))

    def seen_by(self, sees: Array) -> Scratch:
        return self.replace(sees=sees)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, **options: Any) -> tuple[Array, Any]:
        """See `Cache.attend`."""
        assert self.sees is not None
        own = jnp.broadcast_to(window.visible(), (*q.shape[:2], q.shape[1]))
        view = AttentionView(positions=window.positions, seen=jnp.concatenate([self.sees, own], 2),
                             key_positions=jnp.concatenate([self.positions, window.positions], 1), cached=window.cached,
                             tokens=window.tokens, before=self.entries[layer])
        k, v = (jnp.concatenate([x, new], 1) for x, new in zip(self.entries[layer][:2], (k, v), strict=True))
        return self.base.attend(layer, q, k, v, view, **options)

    def append(self, entries: Entries, positions: Array, at: Array) -> Scratch:
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), at, 1)
        return self.replace(entries=jax.tree.map(put, self.entries, tuple(entries)),
                            positions=put(self.positions, positions), sees=None)

    def commit(self, slots: Array) -> Any:
        return self.base.commit(self.entries, slots)
