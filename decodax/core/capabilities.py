"""Optional capabilities of caches beyond `decodax.core.cache.Cache`: one base class for each.

For a cache without a capability, the functions below do nothing or raise a ValueError that names the cache.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
from jax import Array

from decodax.common.struct import Struct
from decodax.core.cache import Cache, Entries

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ReadPrompt:
    """The model and the text for `PromptPhase.finish_prefill` and `Refreshes.refresh`, with which a cache can run the
    model again.

    Attributes:
        model: the network.
        params: its weights.
        tokens: `i32[B, N]`, the text of each row. The cache has the entries of the first `Cache.length[b]` tokens of
            row `b`.
    """

    model: Any
    params: PyTree
    tokens: Array


class PromptPhase(Cache):
    """A cache that handles the prompt in another way than generated tokens: for example an eviction policy that needs
    the whole prompt before it chooses which entries to keep."""

    def prefill_cache(self) -> Cache:
        """Returns the empty cache that is filled during prefill; by default this one."""
        return self

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:
        """Returns the cache for decoding. It is called once, after prefill, on the filled cache from
        `prefill_cache`."""
        return self

    @property
    def layers_read(self) -> int | None:
        """Number of the model's first layers that run during prefill; None: all. The model then returns the entries of
        these layers, and after them the residual stream `f[B, W, D]` after the last of these layers. The cache
        is then a `PromptInPart`."""
        return None


class PromptInPart(PromptPhase):
    """The cache of a prompt phase in which only some of the model's layers run (`layers_read`). It takes models that
    are `decodax.core.around.ReadsInPart`."""

    @abc.abstractmethod
    def refuse_whole(self) -> None:
        """Raises ValueError with the reason why all layers must not run during prefill: for a model that is no
        `ReadsInPart`, or if this is the second cache beside another. Called before tracing."""


class WholePrompt(PromptPhase):
    """A cache that is made from a whole prompt. A draft model has no prefill phase: it writes a prompt window by
    window, with `Window.is_prefill`, into its cache itself."""

    @abc.abstractmethod
    def check_windows(self) -> None:
        """Raises ValueError if windows of a prompt cannot be written into this cache, only into that of
        `prefill_cache`."""


class LoadsPrefix(Cache):
    """A cache that can be filled with keys and values computed earlier, so that their text is not prefilled again."""

    def check_prefix(self) -> None:
        """Raises ValueError if this instance, with its options, needs the text itself."""

    @abc.abstractmethod
    def load_prefix(self, kv: Sequence[Array], length: Array, reuse: tuple[Array, Array] | None = None) -> Self:
        """Returns the cache filled with the given keys and values; called on an empty one from `prefill_cache`.

        Args:
            kv: keys and values of each layer side by side, `f[B, G, T, d + e]`; the keys are rotated.
            length: `i32[B]`, number of valid tokens of each row.
            reuse: attention and change, `f32[B, T]`, of tokens whose keys and values come from another text, for caches
                that recompute some of them (`decodax.cache.prefix.PrefixReuse`).
        """


class LimitsWindow(Cache):
    """A cache that takes windows of a limited number of nodes after prefill."""

    @abc.abstractmethod
    def check_window(self, nodes: int) -> None:
        """Raises ValueError if a window of `nodes` nodes is too wide; the error says which option allows it."""


class AttendsAlone(Cache):
    """A cache with attention to its entries alone, without a window. A model that has two forms of its keys computes
    the attention within a prefill window in the other form, and merges both parts."""

    @abc.abstractmethod
    def attend_cached(self, layer: int, q: Array, window: Any, *, scale: float) -> tuple[Array, Array]:
        """Attends from queries `q`, `f[B, W, H, d]`, to the cached entries.

        Args:
            layer, q, window, scale: see `Cache.attend`.

        Returns:
            The output `f[B, W, H, e]`, and the logarithms of its softmax sums, `f32[B, W, H]`.
        """


class Refreshes(Cache):
    """A cache that from time to time recomputes some of its entries with one more forward pass over committed
    tokens."""

    def needs_refresh(self) -> Array | None:
        """Returns the rows whose entries have to be recomputed before the next round, `bool[B]`; None: never. The
        result may depend on committed tokens only."""
        return None

    def refresh(self, text: ReadPrompt, rows: Array) -> Self:
        """Recomputes the entries of the rows `rows` (`bool[B]`). `text` includes the newest token, whose entry is not
        in the cache yet."""
        raise NotImplementedError(f"{type(self).__name__} computes no entries anew")


class Truncates(Cache):
    """A cache that can drop the end of a text; it declares the feature "truncation"."""

    @abc.abstractmethod
    def truncate(self, length: Array) -> Self:
        """Drops the entries at positions from `length` (`i32[B]`) on."""


class DraftBase(Cache):
    """A cache that can be extended by a buffer for nodes of a draft tree, so that its model can draft."""

    def check_drafts(self) -> None:
        """Raises ValueError if this class inherits `tree_buffer`, but its model cannot draft."""

    @abc.abstractmethod
    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        """Returns this cache with an empty buffer for `room` nodes of a draft tree. `entries`, the entries of any
        window, give the shapes. `TreeBuffer.empty` makes such a buffer for keys and values."""

    def draft_view(self, kind: Any = None) -> Cache:
        """Returns the smaller cache that a model attends to when it drafts for itself.

        Args:
            kind: configuration of a second cache beside this one (`decodax.cache.views`). None: a view of this cache's
                own data, such as fewer bits of each entry.

        Raises:
            ValueError: there is no such cache.
        """
        raise _no_view(self, kind)


class HoldsViews(Cache):
    """A cache that may have second caches for drafts beside it."""

    @abc.abstractmethod
    def without_views(self) -> Cache:
        """Returns the cache of the whole text, without second caches."""


class Draftable(Struct, abc.ABC):
    """A cache (`base`) with a buffer for the nodes of a draft tree. Nodes are added level by level, and the accepted
    ones are committed to `base`. The model gets it in place of the cache while it drafts."""

    if TYPE_CHECKING:
        base: Any

    @property
    def capacity(self) -> int:
        return self.base.capacity

    @property
    def inputs(self) -> Any:
        """Inputs that each row of `base` was given beside its tokens (`Model.init_cache`); None if the model needs
        none."""
        return self.base.inputs

    @abc.abstractmethod
    def seen_by(self, sees: Array) -> Self:
        """Returns this buffer for a window whose node `i` attends to the buffered nodes `sees[:, i]` (`bool[B, W,
        room]`)."""

    @abc.abstractmethod
    def append(self, entries: Entries, positions: Array, at: Array) -> Self:
        """Returns this buffer with the entries of a window, whose nodes have the positions `positions` (`i32[B, W]`),
        stored from index `at` (`i32[]`) on."""

    @abc.abstractmethod
    def commit(self, slots: Array) -> Any:
        """Returns `base` with the entry of buffered node `i` written at position `slots[:, i]` (`i32[B, room]`); -1
        drops it."""


def prefill_cache(cache: Cache) -> Cache:
    """Returns the empty cache that is filled during prefill (`PromptPhase.prefill_cache`); by default `cache`
    itself."""
    return cache.prefill_cache() if isinstance(cache, PromptPhase) else cache


def finish_prefill(cache: Cache, prompt: ReadPrompt) -> Cache:
    """Returns the cache for decoding, for one filled during prefill (`PromptPhase.finish_prefill`); by default `cache`
    itself."""
    return cache.finish_prefill(prompt) if isinstance(cache, PromptPhase) else cache


def layers_read(cache: Any) -> int | None:
    """Returns the number of a model's first layers that run during prefill (`PromptPhase.layers_read`); None: all."""
    return cache.layers_read if isinstance(cache, PromptPhase) else None


def check_window(cache: Cache, nodes: int) -> None:
    """Raises ValueError if a window of `nodes` nodes is too wide for a cache (`LimitsWindow`)."""
    if isinstance(cache, LimitsWindow):
        cache.check_window(nodes)


def check_prefix(cache: Cache) -> None:
    """Raises ValueError if a cache from `prefill_cache` needs the text itself to be prefilled: it is no
    `LoadsPrefix`."""
    if not isinstance(cache, LoadsPrefix):
        raise ValueError(f"context: got keys and values that were computed before; {type(cache).__name__} has to see "
                         "the text read, so it takes the text")
    cache.check_prefix()


def check_drafts(cache: Any) -> None:
    """Raises ValueError if a model with this cache cannot draft: the nodes of a draft tree cannot be kept beside it
    (`DraftBase`)."""
    if not isinstance(cache, DraftBase):
        raise ValueError(f"cache: drafts need one that keeps their nodes beside it, which {type(cache).__name__} does "
                         "not, so its model cannot draft")
    cache.check_drafts()


def check_draft_cache(model: Any, capacity: int, drafts: bool = True) -> Cache:
    """Checks the cache of a draft model, which has to take a prompt window by window (`WholePrompt.check_windows`), and
    with `drafts` to keep the nodes of a draft tree beside it. Returns its shapes and dtypes.

    Raises:
        ValueError: it does not.
    """
    cache: Cache = jax.eval_shape(lambda: model.init_cache(1, capacity))
    if drafts:
        check_drafts(cache)
    if isinstance(cache, WholePrompt):
        cache.check_windows()
    return cache


def load_prefix(cache: Cache, kv: Sequence[Array], length: Array, reuse: tuple[Array, Array] | None = None) -> Cache:
    """Fills an empty cache with keys and values computed earlier; see `LoadsPrefix.load_prefix`.

    Raises:
        ValueError: the cache needs the text itself to be prefilled.
    """
    check_prefix(cache)
    return cache.load_prefix(kv, length, reuse)     # type: ignore[attr-defined]


def needs_refresh(cache: Cache) -> Array | None:
    """Returns the rows whose entries have to be recomputed, `bool[B]`; None: this class never recomputes entries."""
    return cache.needs_refresh() if isinstance(cache, Refreshes) else None


def truncate(cache: Cache, length: Array) -> Cache:
    """Drops the entries at positions from `length` (`i32[B]`) on; see `Truncates.truncate`.

    Raises:
        ValueError: the cache does not support truncation.
    """
    if not isinstance(cache, Truncates):
        raise ValueError(f"cache: {type(cache).__name__} does not support truncation")
    return cache.truncate(length)


def tree_buffer(cache: Any, entries: Entries, room: int) -> Draftable:
    """Returns `cache` with an empty buffer for `room` nodes of a draft tree; see `DraftBase.tree_buffer`.

    Raises:
        ValueError: the cache cannot be extended by such a buffer.
    """
    check_drafts(cache)
    return cache.tree_buffer(entries, room)


def draft_view(cache: Any, kind: Any = None) -> Cache:
    """Returns the smaller cache that a model attends to when it drafts for itself; see `DraftBase.draft_view`.

    Raises:
        ValueError: there is no such cache.
    """
    if not isinstance(cache, DraftBase):
        raise _no_view(cache, kind)
    return cache.draft_view(kind)


def without_views(cache: Any) -> Cache:
    """Returns the cache of the whole text, without second caches for drafts beside it (`HoldsViews`); by default
    `cache` itself."""
    return cache.without_views() if isinstance(cache, HoldsViews) else cache


def _no_view(cache: Any, kind: Any) -> ValueError:
    name = type(cache).__name__
    if kind is None:
        return ValueError(f"cache: {name} has no smaller view of itself for drafts to read")
    return ValueError(f"cache: drafts read a cache of the kind {kind}, and none is beside {name}; takes the model as "
                      "the method runs it (Algorithm.wrap_model)")
