"""The contract of a cache: the state that a model keeps for each row from round to round."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax
import numpy as np
from jax import Array

from decodax.common.struct import Struct
from decodax.core.host_memory import take_rows
from decodax.pallas_kernels.window_attention import Bias

PyTree = Any

Entries = Sequence[PyTree]
"""Values that a model call returns for the cache: for each layer a pytree of arrays `[B, W, ...]` with one entry for
each node. The cache class decides what an entry is, such as keys and values, a latent or a recurrent state."""

Feature = Literal["trees", "subsets", "rewrites", "truncation"]
"""A feature of a cache beyond appending chains of tokens at the end.

"trees": windows in which a node may attend to only some of the nodes before it.
"subsets": windows that attend to only some of the cached entries (`Window.cached`).
"rewrites": entries may be written at any position, in any order, more than once.
"truncation": the end of the text can be dropped (`Truncates.truncate`).
"""

ALL: frozenset[Feature] = frozenset(("trees", "subsets", "rewrites", "truncation"))
NONE: frozenset[Feature] = frozenset()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of a cache's arrays on devices and in host memory.

    Attributes:
        by_row: True if every array has a leading batch axis, so that rows can be on different devices. False for a
            cache with arrays that rows share, such as a pool of pages; such a cache overrides `Cache.select`.
        hosted: a pytree of those arrays that are in host memory (`decodax.core.host_memory`); None if all are on the
            device.
        specs: `PartitionSpec` pytrees by field name, for fields whose placement on a mesh differs from the default
            (`decodax.core.mesh.cache_specs`).
        order: for a cache whose entries are split over devices by position: a function from the width `W` of a prefill
            window to an order of its nodes, `i32[W]`, in which each device gets the nodes of its own entries, the first
            device the first ones; or to None for the order of the text. None: the order of the text.
    """

    by_row: bool = True
    hosted: PyTree = None
    specs: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    order: Callable[[int], np.ndarray | None] | None = None


class Cache(Struct, abc.ABC):
    """Base class of caches: the state that a model keeps for each row of a batch, such as keys and values or recurrent
    states.

    A derived class is a `@struct`. It defines `length`, `capacity` and `commit`, and `attend` if it holds keys and
    values. The other members have defaults for a cache of fixed size that evicts nothing. Entries are identified by the
    position of their token; each class decides where it stores them. Optional capabilities have base classes in
    `decodax.core.capabilities`: `PromptPhase`, `LoadsPrefix`, `AttendsAlone`, `Refreshes`, `Truncates`, `DraftBase`.
    The tests in `tests/contracts` check every cache.

    Attributes:
        supports: the features of the class. An algorithm that needs a missing feature raises a ValueError that names
            it.
        length: `i32[B]`, number of tokens of each row that the cache has processed; the next token has this position.
    """

    supports: ClassVar[frozenset[Feature]] = NONE

    if TYPE_CHECKING:

        @property
        def length(self) -> Array:
            """Number of tokens of each row that the cache has processed, `i32[B]`."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Number of positions `S` of a row that the cache was made for; 0 for a cache that holds nothing."""

    @property
    def inputs(self) -> PyTree:
        """Inputs that each row was given beside its tokens, such as encoder input or an adapter (`Model.init_cache`);
        None if the model does not need them later."""
        return None

    @property
    def layout(self) -> Layout:
        """Placement of the arrays. By default all of them have a leading batch axis and are on the device."""
        return Layout()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        """Attends from the window's queries `q`, `f[B, W, H, d]`, to the cached entries and to the window itself.

        Args:
            layer: index of the layer.
            q: queries of the window's nodes.
            k: keys, `f[B, K, G, d]`. `K` is `W`, unless nodes of earlier windows come before the window's own
                (`AttentionView`).
            v: values, `f[B, K, G, e]`. With `e = 0` the keys are the values, too (`KVLayer.value_width`).
            window: a `Window` or an `AttentionView`. A cache may use its `visible()`, `tokens`, `positions`,
                `key_positions`, `before`, `cached` and `is_prefill`, and in a prefill `live`. `before` has this layer's
                entries of the nodes from earlier windows, or None.
            scale: factor of the attention scores.
            sliding: size of the sliding attention window in tokens; None: unlimited.
            softcap: the scores become `softcap * tanh(score / softcap)`; None: they do not.
            bias: bias of the scores, see `decodax.pallas_kernels.window_attention`.
            sinks: `f[H]`, a learned score of each head in the softmax that has no value; None: there are none. It is
                passed only if a layer has them (`KVLayer.sinks`): a cache without this argument takes other models.

        Returns:
            Output `f[B, W, H, e]`, and the entry of this layer for `commit`: a pytree of arrays `[B, W, ...]`.
        """
        raise NotImplementedError(f"{type(self).__name__} holds no keys and values to attend to")

    @abc.abstractmethod
    def commit(self, entries: Any, slots: Array) -> Self:
        """Writes entry `w` of row `b` at position `slots[b, w]`.

        Args:
            entries: the entries that the model returned for the window (`Entries`).
            slots: `i32[B, W]`; -1 drops the entry.
        """

    def select(self, rows: Array) -> Self:
        """Returns the cache whose row `i` is row `rows[i]` of this one (`i32[B']`). Beam search calls it in every round
        with `B' = B`; a class that can then move less data overrides it."""
        return jax.tree.map(lambda x: take_rows(x, rows), self)

    def room(self, running: Array) -> Array | None:
        """Returns the number of further tokens of each row that fit, `i32[B]`; a row that needs more ends with
        `Status.CAPACITY`. None: the only limit is the token buffer.

        Args:
            running: `bool[B]`, rows that have not finished; the others need no space.
        """
        return None

    def max_commit(self) -> Array | None:
        """Returns the largest number of tokens that the next round may commit, `i32[B]`, at least 1. None: no limit. A
        class sets a limit if an eviction or a flush has to follow these tokens: all of them then attend to the entries
        that plain decoding would attend to, and speculation stays exact."""
        return None


class Sized(Cache):
    """A cache that stores its capacity and its inputs in two fields.

    Attributes:
        size: static; the capacity, the largest number of positions of a text.
        given: the inputs of each row, the value of `Cache.inputs`.
    """

    if TYPE_CHECKING:
        size: int
        given: PyTree

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def inputs(self) -> PyTree:
        return self.given


class CacheConfig(abc.ABC):
    """The configuration of a cache: called with the layers' shapes, it makes an empty cache. Derive a frozen dataclass
    from it. It is compared by value and static under jit. A plain function with the arguments of `__call__` is a valid
    configuration, too.

    Attributes:
        alone: True if the cache cannot be one part of a cache with several (`decodax.cache.views`), because its state
            is not divided by layers.
    """

    alone: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        """Makes an empty cache; the arguments are described in `decodax.core.types.CacheKind`."""

    def with_length(self, new: int) -> CacheConfig:
        """Returns this configuration with sizes that were left open (None) set for texts of at most `new` tokens after
        their prompts."""
        return self

    def of_model(self, lm: Any) -> CacheConfig:
        """Returns this configuration with data that it needs from a loaded model `lm` (a `decodax.LM`), such as the end
        tokens."""
        return self

    def wrap_model(self, lm: Any) -> tuple[Any, PyTree]:
        """Returns the network of the loaded model `lm` with this cache, and its weights. A class that computes with a
        second network returns a network that combines both, and the weights of both."""
        return lm.model.with_cache(self.of_model(lm)), lm.params

    # A member of every config: four policies run the model on (KVzip, LAQ, SpecKV, SpecPC), and those that combine
    # others have to ask them.
    def beyond(self, longest: int) -> int:
        """Returns the number of extra positions on which the model is run after a prompt of `longest` tokens. Their
        entries are not kept."""
        return 0

    def share(self, prefix: int, more: int) -> CacheConfig | None:
        """Returns this configuration for rows whose first tokens are equal and stored once (`SharedPrefixCache`); None
        if its rows cannot share entries.

        Args:
            prefix: largest number of shared tokens.
            more: largest number of prompt tokens after the shared ones.
        """
        return None


def require(cache: Cache, needs: frozenset[Feature], who: str) -> None:
    """Checks that a cache has the features `needs`; `who` is the name in the error.

    Raises:
        ValueError: a feature is missing.
    """
    if lacking := sorted(needs - cache.supports):
        raise ValueError(f"cache: {who} needs one that supports {' and '.join(lacking)}, which {type(cache).__name__} "
                         "does not")
