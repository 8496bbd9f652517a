"""Two caches of one model: the full one for verification, and a smaller one for drafts of the model itself.

With long texts most of the time of a round goes into reading the cache. Drafts from a small part of it are cheap and
good, and are verified with the full cache (MagicDec: Sadhukhan et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import dense
from decodax.cache.wrapper import Wrapper
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Draftable, Entries, Feature, PyTree, ReadPrompt


@struct
class Viewed(Wrapper):
    """A full and a small cache. An entry is a pair of theirs.

    Attributes:
        base: the full cache; a `Viewed` if drafts read several small ones. small: the cache that drafts read.
        kind: static; configuration of `small`.
    """

    base: Any
    small: Any
    kind: Any = static()

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return self.base.supports & self.small.supports

    @property
    def by_row(self) -> bool:       # type: ignore[override]
        return self.base.by_row and self.small.by_row

    @property
    def hosted(self) -> PyTree:
        return self.base.hosted, self.small.hosted

    @property
    def view(self) -> Cache:
        return self.small

    def view_of(self, kind: Any) -> Cache:
        return self.small if kind == self.kind else self.base.view_of(kind)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        _, other = self.small.attend(layer, q, k, v, window, **options)     # the output is not used: not computed
        return out, (entry, other)

    def commit(self, entries: Entries, slots: Array) -> Viewed:
        base, small = zip(*entries, strict=True)
        return self.replace(base=self.base.commit(base, slots), small=self.small.commit(small, slots))

    def select(self, rows: Array) -> Viewed:
        return self.replace(base=self.base.select(rows), small=self.small.select(rows))

    def for_prompt(self) -> Viewed:
        return self.replace(base=self.base.for_prompt(), small=self.small.for_prompt())

    def settled(self, prompt: ReadPrompt) -> Viewed:
        return self.replace(base=self.base.settled(prompt), small=self.small.settled(prompt))

    def scratch(self, entries: Entries, room: int) -> Draftable:
        return self.small.scratch([entry for _, entry in entries], room)

    def room(self, running: Array) -> Array | None:
        return _least(self.base.room(running), self.small.room(running))

    def horizon(self) -> Array | None:
        return _least(self.base.horizon(), self.small.horizon())

    def stale(self) -> Array | None:
        one, other = self.base.stale(), self.small.stale()
        return one if other is None else other if one is None else one | other

    def renewed(self, text: ReadPrompt, rows: Array) -> Viewed:
        new = lambda cache: cache if (stale := cache.stale()) is None else cache.renewed(text, rows & stale)
        return self.replace(base=new(self.base), small=new(self.small))


def _least(a: Array | None, b: Array | None) -> Array | None:
    return a if b is None else b if a is None else jnp.minimum(a, b)


@dataclasses.dataclass(frozen=True)
class WithView(CacheConfig):
    """Configuration of a `Viewed` cache.

    Attributes:
        small: configuration of the cache that drafts read. base: configuration of the full cache.
    """

    small: Any
    base: Any = dense

    def holds(self, kind: Any) -> bool:
        """Returns True if drafts can read a cache of this kind."""
        return kind == self.small or (isinstance(self.base, WithView) and self.base.holds(kind))

    def fit(self, new: int) -> WithView:
        return dataclasses.replace(self, small=_fitted(self.small, new), base=_fitted(self.base, new))

    def beyond(self, longest: int) -> int:
        return max(kind.beyond(longest) if isinstance(kind, CacheConfig) else 0 for kind in (self.small, self.base))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        if isinstance(self.base, CacheConfig) and self.base.alone:
            raise ValueError(f"cache: got {type(self.base).__name__}, which stands beside no other cache, and drafts "
                             "read one of their own; takes another policy, or a draft model")
        make = lambda kind: kind(layers, batch, capacity, dtype, inputs)
        return Viewed(base=make(self.base), small=make(self.small), kind=self.small)


def _fitted(kind: Any, new: int) -> Any:
    return kind.fit(new) if isinstance(kind, CacheConfig) else kind
