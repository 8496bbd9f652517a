"""Attention sinks and a ring of the latest tokens, at positions counted in the cache (StreamingLLM: Xiao et al., 2023,
"Efficient Streaming Language Models with Attention Sinks").

The authors store keys before their rotation and rotate all of them by their places in the cache at each step. Here keys
are rotated once, by their positions in the text. Distances within the ring are then the true ones, and those from a
query to the sinks differ by one number for all sinks: so it is the query that is turned back, and the two parts of the
softmax are merged. A query masks what it may not see by its own position. So rounds and chunks of a prompt may be of
any width, and nothing but the ring is ever kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import KVLayer, Slotted, empty_slots
from decodax.caches.evict.query_scores import moved
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, PyTree
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse


@struct
class SinkCache(Slotted):
    """The first `sinks` tokens and the latest `recent` ones."""

    sinks: int = static()
    recent: int = static()
    shapes: tuple[KVLayer, ...] = static()

    supports = frozenset({"trees"})

    def place(self, layer: int, entry: PyTree, positions: Array) -> Array:
        newest = jnp.maximum(positions.max(1), self.length - 1)[:, None]
        ring = self.sinks + (positions - self.sinks) % self.recent
        ring = jnp.where(positions > newest - self.recent, ring, -1)        # a prompt may be longer than the ring
        return jnp.where(positions < self.sinks, positions, ring)[:, None]

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if bias is not None:
            raise ValueError("cache: streaming-llm takes rotary positions, not a bias of the scores")
        at, keys_at, held, own = window.positions, window.key_positions, self.positions[layer], q.shape[1]
        near = self.recent if sliding is None else min(self.recent, sliding)

        def part(q: Array, sinks: bool, sliding: int | None) -> tuple[Array, Array]:
            chosen = lambda at: (at < self.sinks) == sinks
            return window_attention_lse(q, k, v, window.visible() & chosen(keys_at)[:, None], at, self.kv[layer],
                                        scale=scale, softcap=softcap, sliding=sliding, key_positions=keys_at,
                                        slot_positions=jnp.where(chosen(held), held, -1))

        back = jnp.minimum(at, self.sinks + self.recent - 1) - at       # from a position to its place in the cache
        out, _ = merge(part(q, False, near), part(moved(self.shapes[layer], q, back), True, None))
        return out, (k[:, -own:], v[:, -own:])


@dataclasses.dataclass(frozen=True)
class Sinks(CacheConfig):
    """The kind of `SinkCache`."""

    sinks: int = 4
    recent: int = 512

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(f"sinks, recent: got {self.sinks} and {self.recent}, takes 0 and 1 or more")

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers)
        slots = self.sinks + self.recent if capacity else 0
        return SinkCache(**empty_slots(shapes, batch, capacity, dtype, inputs, slots=slots), sinks=self.sinks,
                         recent=self.recent, shapes=shapes)
