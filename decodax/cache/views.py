"""Two caches for one model: the full one for verification, and a smaller one for drafting with the same model.

With long texts, most of the time of a round goes into reading the cache. Drafts from a small part of the cache are fast
and often accepted, and they are verified with the full cache (MagicDec: Sadhukhan et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from decodax.cache.dense import dense
from decodax.cache.wrapper import Combined
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree
from decodax.core.capabilities import Draftable, draft_view, without_views


@struct
class ViewedEntry(Struct):
    """The entry of a layer in both caches.

    Attributes:
        base: entry of the full cache.
        small: entry of the cache that drafts attend to.
    """

    base: PyTree
    small: PyTree


def whole_entry(entry: PyTree) -> PyTree:
    """Returns a layer's entry in the full cache, from one of a cache with or without views."""
    while isinstance(entry, ViewedEntry):
        entry = entry.base
    return entry


@struct
class Viewed(Combined):
    """A full cache and a smaller one with the same text. Entries are `ViewedEntry`.

    Attributes:
        base: the full cache, which verification attends to. It is a `Viewed` itself if drafts use caches of several
            kinds.
        small: the cache that drafts attend to.
        kind: static; the kind of `small`.
    """

    members = ("base", "small")

    base: Any
    small: Any
    kind: Any = static()

    def draft_view(self, kind: Any = None) -> Cache:
        return self.small if kind == self.kind else draft_view(self.base, kind)

    def without_views(self) -> Cache:       # type: ignore[override]
        return without_views(self.base)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        _, other = self.small.attend(layer, q, k, v, window, **options)     # the output is not used: not computed
        return out, ViewedEntry(entry, other)

    def commit(self, entries: Entries, slots: Array) -> Viewed:
        return self.replace(base=self.base.commit([entry.base for entry in entries], slots),
                            small=self.small.commit([entry.small for entry in entries], slots))

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        raise ValueError("cache: drafts attend to one of several caches (`draft_view`, `without_views`)")


@dataclasses.dataclass(frozen=True)
class WithView(CacheConfig):
    """Configuration of a `Viewed` cache.

    Attributes:
        small: configuration of the cache that drafts attend to.
        base: configuration of the full cache.
    """

    small: Any
    base: Any = dense

    def holds(self, kind: Any) -> bool:
        """Returns True if this configuration includes a cache of the configuration `kind` to which drafts attend."""
        return kind == self.small or (isinstance(self.base, WithView) and self.base.holds(kind))

    def with_length(self, new: int) -> WithView:
        return dataclasses.replace(self, small=_fitted(self.small, new), base=_fitted(self.base, new))

    def beyond(self, longest: int) -> int:
        return max(kind.beyond(longest) if isinstance(kind, CacheConfig) else 0 for kind in (self.small, self.base))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        if isinstance(self.base, CacheConfig) and self.base.alone:
            raise ValueError(f"cache: got {type(self.base).__name__}, which cannot be combined with another cache, and "
                             "drafts read one of their own; takes another policy, or a draft model")
        make = lambda kind: kind(layers, batch, capacity, dtype, inputs)
        return Viewed(base=make(self.base), small=make(self.small), kind=self.small)


def _fitted(kind: Any, new: int) -> Any:
    return kind.with_length(new) if isinstance(kind, CacheConfig) else kind
