"""The base of key/value caches whose slots are independent of positions, such as evicting caches.

Each slot stores the position of its token. So a token may be in any slot, heads may keep different tokens, and a token
may be in no slot. A derived class chooses the slots for the tokens of a commit, whose earlier contents are overwritten.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, empty_kv, key_widths
from decodax.common.struct import static, struct
from decodax.core.cache import Entries, PyTree
from decodax.pallas_kernels.window_attention import Bias, whole_blocks, window_attention


@struct
class Slotted(KeyValues):
    """Keys and values in slots of any order. Derive a `@struct` and implement `place`; add fields after these.

    Attributes:
        kv: a tuple with one array `f[B, G, S, d + e]` for each layer, keys and then values of `S` slots.
        positions: a tuple with one array `i32[B, G, S]` for each layer, position of the token in each slot; -1: empty.
        length: `i32[B]`, number of tokens of the verified text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        size: static; maximum number of tokens of a text.
    """

    kv: tuple[Array, ...]
    positions: tuple[Array, ...]
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()

    @property
    def capacity(self) -> int:
        return self.size

    @abc.abstractmethod
    def place(self, layer: int, entry: PyTree, positions: Array) -> Array:
        """Returns the slot of each token of a commit, `i32[B, G or 1, W]`; -1 drops the token.

        The slots of a head must be different.

        Args:
            layer: number of the layer.
            entry: the layer's entry, a pytree of arrays `[B, W, ...]`.
            positions: `i32[B, W]`, positions of the tokens; -1 for nodes that are not committed.
        """

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        out = window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], scale=scale,
                               sliding=sliding, softcap=softcap, key_positions=window.key_positions,
                               slot_positions=self.positions[layer], bias=bias, sinks=sinks)
        return out, own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> Any:
        new = [self._placed(layer, entry, slots) for layer, entry in enumerate(entries)]
        kv, positions = zip(*new, strict=True)
        return self.replace(kv=kv, positions=positions, length=jnp.maximum(self.length, slots.max(1) + 1))

    def _placed(self, layer: int, entry: PyTree, positions: Array) -> tuple[Array, Array]:
        kv, held = self.kv[layer], self.positions[layer]
        to = self.place(layer, entry, positions)
        to = jnp.broadcast_to(to, (held.shape[0], held.shape[1], to.shape[2]))
        to = jnp.where((to >= 0) & (positions >= 0)[:, None], to, held.shape[2])
        put = jax.vmap(jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop")))
        both, wide = entry.both.swapaxes(1, 2), jnp.broadcast_to(positions[:, None], to.shape)
        return put(kv, both, to), put(held, wide, to)


def empty_slots(layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                inputs: PyTree = None, *, slots: int) -> dict[str, Any]:
    """Returns the fields of an empty `Slotted` cache.

    Args:
        layers, batch, capacity, dtype, inputs: see `dense`.
        slots: number of slots of each head. Numbers above `BLOCK` are rounded up to whole blocks.
    """
    slots = whole_blocks(slots)
    return dict(kv=empty_kv(layers, batch, slots, dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
                size=capacity, widths=key_widths(layers),
                positions=tuple(jnp.full((batch, heads, slots), -1, jnp.int32) for heads, *_ in layers))
