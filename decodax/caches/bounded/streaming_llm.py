"""StreamingLLM: attention sinks and a ring of the latest tokens, at positions counted in the cache ("Efficient
Streaming Language Models with Attention Sinks", Xiao et al., 2023).

The authors store keys before rotation, and rotate all of them by their places in the cache at each step. Here keys are
rotated once, by their positions in the text. Distances within the ring are then right. Distances from a query to the
sinks are all too large by the same number; so the query is moved back by it for the sinks, and the two parts of the
softmax are merged. Since a mask hides from each query what has left its window, rounds and chunks of a prompt may have
any width, and no token outside the ring is stored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache import KVLayer, Slotted, empty_slots
from decodax.cache.entry import own_entry
from decodax.cache.key_values import KVConfig, Score
from decodax.caches.rotation import moved
from decodax.common.options import Count, Whole, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, PyTree
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse


@struct
class StreamingLLMCache(Slotted):
    """The first `start_size` tokens, and a ring of the latest `recent_size` tokens.

    Attributes:
        start_size, recent_size: static; see `StreamingLLMConfig`.
        shapes: static; the `KVLayer` of each layer.
    """

    start_size: int = static()
    recent_size: int = static()
    shapes: tuple[KVLayer, ...] = static()

    supports = frozenset({"trees"})

    def place(self, layer: int, entry: PyTree, positions: Array) -> Array:
        newest = jnp.maximum(positions.max(1), self.length - 1)[:, None]
        ring = self.start_size + (positions - self.start_size) % self.recent_size
        ring = jnp.where(positions > newest - self.recent_size, ring, -1)        # a prompt may be longer than the ring
        return jnp.where(positions < self.start_size, positions, ring)[:, None]

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        at, keys_at, held = window.positions, window.key_positions, self.positions[layer]
        near = self.recent_size if sliding is None else min(self.recent_size, sliding)

        def part(q: Array, first: bool, sliding: int | None) -> tuple[Array, Array]:
            chosen = lambda at: (at < self.start_size) == first
            return window_attention_lse(q, k, v, window.visible() & chosen(keys_at)[:, None], at, self.kv[layer],
                                        scale=scale, softcap=softcap, sliding=sliding, key_positions=keys_at,
                                        slot_positions=jnp.where(chosen(held), held, -1),
                                        sinks=None if first else sinks)

        # from a position in the text to its place in the cache
        back = jnp.minimum(at, self.start_size + self.recent_size - 1) - at
        out, _ = merge(part(q, False, near), part(moved(self.shapes[layer], q, back), True, None))
        return out, own_entry(q, k, v)


@CACHES.register("streaming-llm", "Efficient Streaming Language Models with Attention Sinks", "Xiao et al. 2023",
                 family="bounded")
@dataclasses.dataclass(frozen=True)
class StreamingLLMConfig(KVConfig):
    """Keeps the first tokens and a ring of the latest ones, at positions that are counted in the cache.

    Decodes texts of any length in constant memory, with a model that has rotary positions; prompts are prefilled in the
    same memory. Tokens that leave the ring are lost.

    Attributes:
        start_size: number of first tokens, the attention sinks.
        recent_size: number of latest tokens.
    """

    start_size: Whole = 4
    recent_size: Count = 512

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        slots = self.start_size + self.recent_size
        return StreamingLLMCache(**empty_slots(shapes, batch, size, dtype, inputs, slots=slots),
                                 start_size=self.start_size, recent_size=self.recent_size, shapes=shapes)
