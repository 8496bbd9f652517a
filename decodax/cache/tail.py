"""The base of caches that store the beginning of each text in a form of its own, and later tokens as plain keys and
values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import write_entries
from decodax.cache.key_values import KVConfig, KVLayer
from decodax.cache.tree_buffer import TreeBuffer
from decodax.common.struct import static, struct
from decodax.core.cache import Entries, PyTree, Sized
from decodax.core.capabilities import Draftable, DraftBase
from decodax.pallas_kernels.window_attention import window_attention_lse


@struct
class Tail(Sized, DraftBase):
    """Stores the tokens after the beginning of a text as plain keys and values.

    Derive a `@struct` with further fields for the beginning, and with `start` as a field or a property. Implement
    `attend`, which merges attention to the beginning with the result of `attend_tail`.

    Attributes:
        kv: a tuple with one array `f[B, G, R, d + e]` for each layer; the token at position `p` is in slot `p - start`.
        start: `i32[B]`, position of the first token in `kv`.
        length: `i32[B]`, number of committed tokens of each row, the beginning included.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        size: static; maximum number of tokens of a text.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    kv: tuple[Array, ...]
    length: Array
    given: PyTree
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: KVConfig = static()

    supports = frozenset({"trees"})

    if TYPE_CHECKING:

        @property
        def start(self) -> Array: ...

    def room(self, running: Array) -> Array | None:
        return self.kv[0].shape[2] + self.start - self.length if self.kv else None

    def attend_tail(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any
                    ) -> tuple[Array, Array]:
        """Attends to the later tokens and to the window. Merge the result with attention to the beginning (`merge`).

        Args:
            layer, q, k, v, window: see `Cache.attend`.
            options: options of `window_attention_lse`, such as `scale`.

        Returns:
            The output `f[B, W, H, e]`, and the logarithms of its softmax sums, `f32[B, W, H]`.
        """
        start = self.start[:, None]
        return window_attention_lse(q, k, v, window.visible(), window.positions - start, self.kv[layer],
                                    self.length - self.start, key_positions=window.key_positions - start, **options)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        to = jnp.where(slots >= 0, slots - self.start[:, None], -1)
        kv = write_entries(self.kv, entries, to)
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return TreeBuffer.empty(self, entries, room)
