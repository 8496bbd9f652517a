"""Shared parts of caches of keys and values: the shapes of a layer, and one array for each layer with both keys and
values."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import own_entry
from decodax.cache.tree_buffer import TreeBuffer
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import ALL, Cache, CacheConfig, Entries, Feature, PyTree
from decodax.core.capabilities import Draftable, DraftBase, Truncates
from decodax.core.types import CacheKind
from decodax.pallas_kernels.window_attention import Bias, window_attention

Score = Literal["sliding windows", "soft caps", "biases", "sinks"]
"""Changes to attention scores that a model may need beyond the scaled product of query and key."""


class KVLayer(NamedTuple):
    """The shape of a layer's keys and values, which a model passes to a cache.

    Attributes:
        heads: number of key/value heads, `G`.
        width: number of channels of a key, `d`.
        value_width: number of channels of a value, `e`; None: `d`. 0: the keys are the values, too, and are stored
            once. A model with multi-head latent attention has such keys, its latents (`decodax.models.latent`).
        queries: number of query heads, `H`; None: not known.
        rope: the `Rope` that rotates queries and keys; None: they are not rotated.
        context: the text length that the scaling of `rope` is meant for.
        sliding: a query attends to this number of latest positions, its own included; None: to all.
        softcap: bound of the scores, which become `softcap * tanh(score / softcap)`; None: no bound.
        bias: True if the model adds a bias to the scores, such as one that depends on positions.
        sinks: True if each query head has a learned score in the softmax without a value.
        chooses: True if the model passes a choice of keys in place of the bias (`KeyChoice`).
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
    sinks: bool = False
    chooses: bool = False

    @property
    def scores(self) -> frozenset[Score]:
        """Changes of attention scores that the layer needs, by name: "sliding windows", "soft caps", "biases" and
        "sinks". A cache may not support all of them (`KVConfig.refuses`)."""
        given: tuple[tuple[Score, bool], ...] = (("sliding windows", self.sliding is not None),
                                                 ("soft caps", self.softcap is not None), ("biases", self.bias),
                                                 ("sinks", self.sinks))
        return frozenset(name for name, there in given if there)

    @property
    def both(self) -> int:
        """Number of channels of a key and its value together, `d + e`."""
        return self.width + (self.width if self.value_width is None else self.value_width)


class KeyValues(DraftBase):
    """Base of caches with one array of keys and values for each layer, such as `Dense` and `Slotted`.

    Attributes:
        kv: a tuple with one array `f[B, G, S, d + e]` for each layer: in each slot a key, then its value. Both share an
            array since a TPU pads the last axis to 128 lanes: with 64 channels, an array of keys alone would take twice
            their bytes.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        padding: static; the number of zeros after an entry of each layer; (): none.
    """

    if TYPE_CHECKING:       # each kind declares them, in the order of its fields
        kv: tuple[Array, ...]
        given: PyTree
        widths: tuple[int, ...]
        padding: tuple[int, ...]
    else:
        padding = ()

    def padded(self, layer: int) -> int:
        """Returns the number of zeros after each entry of a layer (`decodax.cache.lanes`)."""
        return self.padding[layer] if self.padding else 0

    def keys(self, layer: int) -> Array:
        """Returns the keys of a layer, `f[B, G, S, d]`."""
        return self.kv[layer][..., :self.widths[layer]]

    def values(self, layer: int) -> Array:
        """Returns the values of a layer, `f[B, G, S, e]`."""
        kv = self.kv[layer]
        return kv[..., self.widths[layer]:kv.shape[3] - self.padded(layer)]

    @property
    def capacity(self) -> int:
        return self.kv[0].shape[2] if self.kv else 0

    @property
    def inputs(self) -> PyTree:
        return self.given

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return TreeBuffer.empty(self, entries, room)


@struct
class NoKeyValues(Truncates):
    """A cache of capacity 0: the window attends to itself alone, and nothing is stored.

    Attributes:
        length: `i32[B]`, zeros.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
    """

    supports: ClassVar[frozenset[Feature]] = ALL

    length: Array
    given: PyTree = None

    @property
    def capacity(self) -> int:
        return 0

    @property
    def inputs(self) -> PyTree:
        return self.given

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        out = window_attention(q, k, v, window.visible(), window.positions, scale=scale, sliding=sliding,
                               softcap=softcap, key_positions=window.key_positions, bias=bias, sinks=sinks)
        return out, own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> NoKeyValues:
        return self

    def truncate(self, length: Array) -> NoKeyValues:
        return self


def no_key_values(batch: int, inputs: PyTree = None) -> NoKeyValues:
    """Returns a cache of capacity 0 for `batch` rows."""
    return NoKeyValues(jnp.zeros(batch, jnp.int32), inputs)


class KVConfig(CacheConfig):
    """Base of configurations of caches that are built from the `KVLayer` of each layer. Implement `empty`."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Name of the cache in error messages; by default the name of the class."""

    @abc.abstractmethod
    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        """Returns an empty cache.

        Args:
            shapes: the shape of each layer.
            batch: number of rows.
            size: maximum number of tokens of a text.
            dtype: dtype of keys and values.
            inputs: inputs of each row beside its tokens; see `Cache.inputs`.
        """

    def takes_latents(self) -> bool:
        """Returns True if the cache supports latents: keys that are the values, too, and are stored once
        (`KVLayer.value_width` is 0). The default is False: a model with latents is refused with an error before
        tracing."""
        return False

    def takes_choices(self) -> bool:
        """Returns True if the cache supports a choice of keys (`KVLayer.chooses`): it keeps all tokens, in slots that
        are positions. The default is False: a model with one is refused with an error before tracing."""
        return False

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        """Returns the changes of attention scores that the cache does not support in a layer. A model that needs one of
        them is refused with an error before tracing."""
        return frozenset()

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        if not capacity:        # what a forward without a cache takes, whatever the kind
            return no_key_values(batch, inputs)
        shapes = tuple(KVLayer(*layer) for layer in layers)
        own = getattr(self, "name", type(self).__name__)            # of a config that a function makes
        name = next((n for n, entry in CACHES.items() if entry.make is type(self)), own)
        if not self.takes_latents():
            refuse_latents(name, shapes)
        if not self.takes_choices() and any(shape.chooses for shape in shapes):
            raise ValueError(f"cache: {name} takes a model whose queries attend to all tokens; in this one an index "
                             "chooses some of them, which takes the default cache or paged")
        for i, shape in enumerate(shapes):
            if refused := sorted(self.refuses(i, shape) & shape.scores):
                raise ValueError(f"cache: {name} takes a model without {' and '.join(refused)} of its attention "
                                 f"scores, which layer {i} of this one has")
        return self.empty(shapes, batch, capacity, dtype, inputs)


@dataclasses.dataclass(frozen=True)
class FittedConfig(KVConfig):
    """Base of configurations whose caches are smaller if the number of tokens after the prompt is known.

    Attributes:
        _new: maximum number of tokens after the prompt, set by `with_length`; None: not known.
    """

    _new: int | None = dataclasses.field(default=None, kw_only=True)

    def with_length(self, new: int) -> Self:
        return dataclasses.replace(self, _new=new)

    def new_tokens(self, size: int) -> int:
        """Returns the maximum number of tokens after the prompt if a text has at most `size` tokens."""
        return size if self._new is None else min(self._new, size)


def cache_of(kind: CacheKind, layers: Sequence[KVLayer], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
             inputs: PyTree = None) -> Cache:
    """Returns an empty cache of a kind for a model's layers.

    Raises:
        ValueError: a layer has sinks, and `attend` of the cache does not take them.
    """
    made = kind(layers, batch, capacity, dtype, inputs)
    if any(layer.sinks for layer in layers):
        takes = inspect.signature(made.attend).parameters.values()
        if all(x.name != "sinks" and x.kind is not x.VAR_KEYWORD for x in takes):
            raise ValueError(f"cache: got a {type(made).__name__}, whose attend takes no sinks; takes a model without "
                             "sinks of its attention scores")
    return made


def refuse_latents(name: str, layers: Sequence[tuple[Any, ...]]) -> None:
    """Raises ValueError if the keys of a layer are its values, too. For the cache `name`, which does not support it;
    `layers` has a `KVLayer` for each layer."""
    if any(KVLayer(*layer).value_width == 0 for layer in layers):
        raise ValueError(f"cache: {name} takes a model with keys and values for each head; this one has multi-head "
                         "latent attention, whose cache holds one latent for all heads")


def refuse_prefill(name: str) -> None:
    """Raises the ValueError of `WholePrompt.check_windows` for the cache `name`, which is made from a whole prompt: a
    draft model's prompt would be read into it window by window."""
    raise ValueError(f"cache: {name} needs the whole prompt at once, which a draft model does not get; takes another "
                     "cache for the draft model")


def empty_kv(layers: Sequence[tuple[Any, ...]], rows: int, slots: int,
             dtype: jax.typing.DTypeLike) -> tuple[Array, ...]:
    """Returns zeros for each layer, `f[rows, G, slots, d + e]`.

    Args:
        layers: a `KVLayer` for each layer, or a tuple of its first fields.
        rows: number of rows, or of pages.
        slots: number of slots in each.
        dtype: dtype of keys and values.
    """
    shapes = [KVLayer(*layer) for layer in layers]
    return tuple(jnp.zeros((rows, shape.heads, slots, shape.both), dtype) for shape in shapes)


def key_widths(layers: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """Returns the key width `d` of each layer. `layers` has a `KVLayer` for each layer, or a tuple of its first
    fields."""
    return tuple(layer[1] for layer in layers)
