"""Nodes of earlier windows beside a cache: how a draft tree is expanded level by level.

Nothing unverified is written into the cache itself: the keys of expanded nodes lie in a buffer of their own, seen
through an ancestor mask, until a decision says which of them are true.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import Cache, WindowKV
from decodax.cache.window import Window
from decodax.struct import Struct, struct


@struct
class AttentionView(Struct):
    """What attention reads of a window whose keys are more than its queries.

    Attributes:
        positions: `i32[B, W]`. key_positions: `i32[B, K]`. seen: `bool[B, W, K]`. cached: as in `Window`.
    """

    positions: Array
    key_positions: Array
    seen: Array
    cached: Array | None = None

    def visible(self) -> Array:
        return self.seen


@struct
class Scratch(Struct):
    """A cache with room for tree nodes.

    Attributes:
        base: the cache, which holds what is verified.
        keys, values: for each layer `f[B, room, G, d]`.
        positions: `i32[B, room]`.
        sees: `bool[B, W, room]`, which of the nodes the next window's queries see; None until `seen_by` says.
    """

    base: Any
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    sees: Array | None = None

    @classmethod
    def empty(cls, base: Cache, kv: WindowKV, room: int) -> Scratch:
        """Room for so many nodes; `kv` is any window's, for the shapes."""
        zeros = lambda x: jnp.zeros((x.shape[0], room, *x.shape[2:]), x.dtype)
        return cls(base=base, keys=tuple(zeros(k) for k, _ in kv), values=tuple(zeros(v) for _, v in kv),
                   positions=jnp.zeros((kv[0][0].shape[0], room), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.base.capacity

    def seen_by(self, sees: Array) -> Scratch:
        """For a window whose node `i` sees the nodes `sees[:, i]` (`bool[B, W, room]`)."""
        return self.replace(sees=sees)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, *, scale: float,
               sliding: int | None = None, softcap: float | None = None) -> Array:
        assert self.sees is not None
        own = jnp.broadcast_to(window.visible(), (*q.shape[:2], q.shape[1]))
        view = AttentionView(positions=window.positions, seen=jnp.concatenate([self.sees, own], 2),
                             key_positions=jnp.concatenate([self.positions, window.positions], 1), cached=window.cached)
        k, v = (jnp.concatenate([x[layer], new], 1) for x, new in ((self.keys, k), (self.values, v)))
        return self.base.attend(layer, q, k, v, view, scale=scale, sliding=sliding, softcap=softcap)

    def append(self, kv: WindowKV, positions: Array, at: Array) -> Scratch:
        """With a window's nodes at `at` (`i32[]`) and behind."""
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), at, 1)
        return self.replace(keys=tuple(put(x, k) for x, (k, _) in zip(self.keys, kv, strict=True)),
                            values=tuple(put(x, v) for x, (_, v) in zip(self.values, kv, strict=True)),
                            positions=put(self.positions, positions), sees=None)

    def commit(self, slots: Array) -> Any:
        """The cache with node `i` written to `slots[:, i]` (`i32[B, room]`, -1 drops it)."""
        return self.base.commit(tuple(zip(self.keys, self.values, strict=True)), slots)
