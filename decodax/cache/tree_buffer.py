"""A buffer for the nodes of a draft tree that is expanded level by level.

A cache holds entries of verified tokens only. Entries of unverified nodes are kept in this buffer and attended to under
an ancestor mask. After verification the entries of accepted nodes are written to the cache.
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
    """A window with more keys than queries, which replaces a `Window` in `Cache.attend`. The `K` keys are those of
    nodes of earlier windows, then those of the window's `W` own nodes.

    Attributes:
        positions: `i32[B, W]`, positions of the queries.
        key_positions: `i32[B, K]`, positions of the keys.
        seen: `bool[B, W, K]`, True if a query attends to a key.
        cached: `bool[B, S]` or None, cache slots that the queries attend to; see `Window`.
        tokens: `i32[B, W]`, token ids of the queries. None if keys and nodes do not correspond one to one.
        before: entries of this layer for the nodes of earlier windows, `[B, K - W, ...]`. None as for `tokens`.
    """

    positions: Array
    key_positions: Array
    seen: Array
    cached: Array | None = None
    tokens: Array | None = None
    before: Any = None

    @property
    def is_prefill(self) -> bool:
        """Always False: a view is never part of a prefill (`Window.is_prefill`)."""
        return False

    def visible(self) -> Array:
        return self.seen


@struct
class TreeBuffer(Draftable):
    """A cache of keys and values, with a buffer for the nodes of a draft tree. The model uses it in place of the cache.

    Attributes:
        base: the cache of the verified text. Its entries are structs that begin with keys and values.
        entries: for each layer the entries of the nodes, `[B, room, ...]`.
        positions: `i32[B, room]`, positions of the nodes.
        sees: `bool[B, W, room]`, True if a query of the next window attends to a node of the buffer; None before
            `seen_by`.
    """

    base: Any
    entries: tuple[Any, ...]
    positions: Array
    sees: Array | None = None

    @classmethod
    def empty(cls, base: Cache, entries: Entries, room: int) -> TreeBuffer:
        """Returns a buffer without nodes.

        Args:
            base: the cache of the verified text.
            entries: entries of any window, which give the shapes and dtypes.
            room: maximum number of nodes.
        """
        zeros = lambda x: jnp.zeros((x.shape[0], room, *x.shape[2:]), x.dtype)
        batch = jax.tree.leaves(entries)[0].shape[0]
        return cls(base=base, entries=jax.tree.map(zeros, tuple(entries)),
                   positions=jnp.zeros((batch, room), jnp.int32))

    def seen_by(self, sees: Array) -> TreeBuffer:
        return self.replace(sees=sees)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, **options: Any) -> tuple[Array, Any]:
        """Attends from the window's queries to the tokens in `base`, to the buffered nodes that the attribute `sees`
        selects, and to the window's own nodes.

        The arguments are those of `Cache.attend`, with its keyword arguments as `options`. Returns the output `f[B, W,
        H, e]`, and this layer's entry of the window's nodes for `append`.
        """
        assert self.sees is not None
        own = jnp.broadcast_to(window.visible(), (*window.positions.shape, window.positions.shape[1]))
        view = AttentionView(positions=window.positions, seen=jnp.concatenate([self.sees, own], 2),
                             key_positions=jnp.concatenate([self.positions, window.positions], 1), cached=window.cached,
                             tokens=window.tokens, before=self.entries[layer])
        if options.get("walk") is None:         # a recurrence has no keys and values; it starts from states in `before`
            held = self.entries[layer]
            k, v = jnp.concatenate([held.keys, k], 1), jnp.concatenate([held.values, v], 1)
        return self.base.attend(layer, q, k, v, view, **options)

    def append(self, entries: Entries, positions: Array, at: Array) -> TreeBuffer:
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), at, 1)
        return self.replace(entries=jax.tree.map(put, self.entries, tuple(entries)),
                            positions=put(self.positions, positions), sees=None)

    def commit(self, slots: Array) -> Any:
        return self.base.commit(self.entries, slots)
