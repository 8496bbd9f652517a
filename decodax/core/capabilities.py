"""What some caches can do beyond the contract of `decodax.core.cache.Cache`: one class for each capability.

A cache that has a capability derives from its class. The functions below do nothing for a cache without it, or refuse
it by name.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from jax import Array

from decodax.common.struct import Struct
from decodax.core.cache import Cache, Entries

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ReadPrompt:
    """The model and the text that a cache is finished or refreshed with (`Cache.finish_prefill`, `Cache.refresh`).

    Attributes:
        model, params: the network and its weights. tokens: `i32[B, N]`, of which a row's cache holds the first
            `Cache.length`.
    """

    model: Any
    params: PyTree
    tokens: Array


class PromptPhase(Cache):
    """A cache whose prompt is read in another way than the tokens of the rounds: a policy that chooses among the tokens
    of a prompt has to see all of them first."""

    def prefill_cache(self) -> Cache:
        """Returns the empty cache that the prompt is read into; by default this one."""
        return self

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:
        """Returns the cache that the rounds use, once the prompt is in the one from `prefill_cache`."""
        return self

    @property
    def layers_read(self) -> int | None:
        """Number of the model's first layers that run on a prompt; None: all. The model then returns the entries of
        these layers, and after them the residual stream `f[B, W, D]` that comes out of them."""
        return None


class LoadsPrefix(Cache):
    """A cache that takes keys and values which were computed before, in place of reading their text."""

    @abc.abstractmethod
    def load_prefix(self, kv: Sequence[Array], length: Array, reuse: tuple[Array, Array] | None = None) -> Self:
        """Returns the cache with the given keys and values, for an empty one from `prefill_cache`.

        Args:
            kv: `f[B, G, T, d + e]` of each layer, keys rotated. length: `i32[B]`, number of tokens that count.
            reuse: attention and change, `f32[B, T]`, of tokens that were computed in another text, for kinds that
                recompute some of them (`decodax.caches.prefix.prefix.PrefixReuse`).
        """


class Refreshes(Cache):
    """A cache that computes some of its entries anew now and then, with one more forward on committed tokens."""

    def needs_refresh(self) -> Array | None:
        """Returns the rows whose entries have to be computed anew before the next round, `bool[B]`; None: never. Like
        everything in a cache it depends on committed tokens only."""
        return None

    def refresh(self, text: ReadPrompt, rows: Array) -> Self:
        """Recomputes those entries of `rows` (`bool[B]`). The tokens of `text` include the newest one, whose entry is
        not in the cache yet."""
        raise NotImplementedError(f"{type(self).__name__} computes no entries anew")


class Truncates(Cache):
    """A cache that can forget the end of a text; it declares the feature "truncation"."""

    @abc.abstractmethod
    def truncate(self, length: Array) -> Self:
        """Drops the entries at positions from `length` (`i32[B]`) on."""


class DraftBase(Cache):
    """A cache beside which the nodes of a draft tree can be kept, so that its model can draft."""

    @abc.abstractmethod
    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        """Returns room for `room` nodes of a draft tree beside this cache. `entries` of any window give the shapes.
        `Scratch.empty` makes one for keys and values."""

    def draft_view(self, kind: Any = None) -> Cache:
        """Returns the smaller cache that drafts by the model itself read.

        Args:
            kind: kind of a cache that stands beside this one (`decodax.cache.views`); None: a part of this one, such as
                fewer bits of it.

        Raises:
            ValueError: there is none.
        """
        raise _no_view(self, kind)


class Draftable(Struct, abc.ABC):
    """A cache beside which nodes of a draft tree are kept, level by level, until a decision says which are true. It is
    handed to the model in the cache's place."""

    if TYPE_CHECKING:
        base: Any

    @property
    def capacity(self) -> int:
        return self.base.capacity

    @property
    def inputs(self) -> Any:
        """As in `Cache`."""
        return self.base.inputs

    @abc.abstractmethod
    def seen_by(self, sees: Array) -> Self:
        """For a window whose node `i` sees the nodes `sees[:, i]` (`bool[B, W, room]`)."""

    @abc.abstractmethod
    def append(self, entries: Entries, positions: Array, at: Array) -> Self:
        """With a window's nodes, at positions `i32[B, W]`, in the places `at` (`i32[]`) and behind."""

    @abc.abstractmethod
    def commit(self, slots: Array) -> Any:
        """The cache with node `i` written for position `slots[:, i]` (`i32[B, room]`, -1 drops it)."""


def prefill_cache(cache: Cache) -> Cache:
    """Returns the empty cache that a prompt is read into."""
    return cache.prefill_cache() if isinstance(cache, PromptPhase) else cache


def finish_prefill(cache: Cache, prompt: ReadPrompt) -> Cache:
    """Returns the cache that the rounds use, for one that a prompt was read into."""
    return cache.finish_prefill(prompt) if isinstance(cache, PromptPhase) else cache


def layers_read(cache: Any) -> int | None:
    """Returns the number of a model's first layers that run on a prompt; None: all."""
    return cache.layers_read if isinstance(cache, PromptPhase) else None


def load_prefix(cache: Cache, kv: Sequence[Array], length: Array, reuse: tuple[Array, Array] | None = None) -> Cache:
    """`LoadsPrefix.load_prefix`.

    Raises:
        ValueError: the cache has to see the text read.
    """
    if not isinstance(cache, LoadsPrefix):
        raise ValueError(f"context: got keys and values that were computed before; {type(cache).__name__} has to see "
                         "the text read, so it takes the text")
    return cache.load_prefix(kv, length, reuse)


def needs_refresh(cache: Cache) -> Array | None:
    """Returns the rows whose entries have to be computed anew, `bool[B]`; None: this kind never computes them anew."""
    return cache.needs_refresh() if isinstance(cache, Refreshes) else None


def truncate(cache: Cache, length: Array) -> Cache:
    """`Truncates.truncate`.

    Raises:
        ValueError: the cache cannot forget.
    """
    if not isinstance(cache, Truncates):
        raise ValueError(f"cache: {type(cache).__name__} does not support truncation")
    return cache.truncate(length)


def tree_buffer(cache: Any, entries: Entries, room: int) -> Draftable:
    """`DraftBase.tree_buffer`.

    Raises:
        ValueError: nothing can be kept beside the cache.
    """
    if not isinstance(cache, DraftBase):
        raise ValueError(f"cache: drafts need one that keeps their nodes beside it, which {type(cache).__name__} does "
                         "not, so its model cannot draft")
    return cache.tree_buffer(entries, room)


def draft_view(cache: Any, kind: Any = None) -> Cache:
    """`DraftBase.draft_view`.

    Raises:
        ValueError: there is no such cache.
    """
    if not isinstance(cache, DraftBase):
        raise _no_view(cache, kind)
    return cache.draft_view(kind)


def _no_view(cache: Any, kind: Any) -> ValueError:
    name = type(cache).__name__
    if kind is None:
        return ValueError(f"cache: {name} has no smaller view of itself for drafts to read")
    return ValueError(f"cache: drafts read a cache of the kind {kind}, and none is beside {name}; takes the model as "
                      "the method runs it (Algorithm.through)")
