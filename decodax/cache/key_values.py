"""Shared parts of caches of keys and values: the shape of a layer, and one array a layer that holds both."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.scratch import Scratch
from decodax.common.registry import CACHES
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree
from decodax.core.capabilities import Draftable, DraftBase

Score = Literal["sliding windows", "soft caps", "biases"]
"""Changes that a model makes to attention scores beyond the scaled product of query and key."""


class KVLayer(NamedTuple):
    """The shape of a layer's keys and values, which a model passes to a cache.

    Attributes:
        heads: number of key/value heads, `G`. width: of keys, `d`. value_width: of values, `e`; None: `d`.
        queries: number of query heads, `H`; None: not known.
        rope: the `Rope` of queries and keys, or None. context: the length that its scaling is for.
        sliding: number of latest positions that a query sees, with its own; None: all.
        softcap: bound of the scores, which are `softcap * tanh(score / softcap)`; None: no bound.
        bias: True if something is added to the scores, by positions or otherwise.
    """

    heads: int
    width: int
    value_width: int | None = None
    queries: int | None = None
    rope: Any = None
    context: int | None = None
    sliding: int | None = None
    softcap: float | None = None
    bias: bool = False

    @property
    def scores(self) -> frozenset[Score]:
        """Changes of the layer's attention scores, which a kind of cache may not take (`KVConfig.refuses`)."""
        given: tuple[tuple[Score, bool], ...] = (("sliding windows", self.sliding is not None),
                                                 ("soft caps", self.softcap is not None), ("biases", self.bias))
        return frozenset(name for name, there in given if there)

    @property
    def both(self) -> int:
        """Width of a key and its value together."""
        return self.width + (self.width if self.value_width is None else self.value_width)


class KeyValues(DraftBase):
    """A cache whose entries are pairs of a key and a value, for `Dense` and `Slotted`.

    Attributes:
        kv: a tuple of one `f[B, G, S, d + e]` a layer, the key of each slot and then its value. One array for both,
            since a TPU pads the last axis to 128 lanes: with heads of 64 keys alone would take twice their bytes.
        given: see `Cache.inputs`. widths: static; the width `d` of the keys of each layer.
    """

    if TYPE_CHECKING:       # each kind declares them, in the order of its fields
        kv: tuple[Array, ...]
        given: PyTree
        widths: tuple[int, ...]

    def keys(self, layer: int) -> Array:
        """Returns the keys of a layer, `f[B, G, S, d]`."""
        return self.kv[layer][..., :self.widths[layer]]

    def values(self, layer: int) -> Array:
        """Returns the values of a layer, `f[B, G, S, e]`."""
        return self.kv[layer][..., self.widths[layer]:]

    @property
    def capacity(self) -> int:
        return self.kv[0].shape[2] if self.kv else 0

    @property
    def inputs(self) -> PyTree:
        return self.given

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)


class KVConfig(CacheConfig):
    """Base of configurations of caches that are made from the shapes of layers. Implement `empty`."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """What errors call it; default the name of its class."""

    @abc.abstractmethod
    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        """Returns an empty cache for texts of up to `size` tokens. `shapes` is empty if `size` is 0."""

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        """Returns the changes of attention scores that it cannot take in a layer; checked before anything is traced."""
        return frozenset()

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        for i, shape in enumerate(shapes):
            if refused := sorted(self.refuses(i, shape) & shape.scores):
                name = next((n for n, entry in CACHES.items() if entry.make is type(self)), type(self).__name__)
                raise ValueError(f"cache: {name} takes a model without {' and '.join(refused)} of its attention "
                                 f"scores, which layer {i} of this one has")
        return self.empty(shapes, batch, capacity, dtype, inputs)


def own_entry(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns the keys and values of the window's own nodes, which stand after those of earlier windows."""
    earlier = k.shape[1] - q.shape[1]
    return k[:, earlier:], v[:, earlier:]


def empty_kv(layers: Sequence[tuple[Any, ...]], rows: int, slots: int,
             dtype: jax.typing.DTypeLike) -> tuple[Array, ...]:
    """Returns zeros, one `f[rows, G, slots, d + e]` a layer. `layers`: as in `dense`."""
    shapes = [KVLayer(*layer) for layer in layers]
    return tuple(jnp.zeros((rows, shape.heads, slots, shape.both), dtype) for shape in shapes)


def key_widths(layers: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """Returns the width of the keys of each layer. `layers`: as in `dense`."""
    return tuple(layer[1] for layer in layers)
