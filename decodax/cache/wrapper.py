"""The base of caches around another cache, to which they forward all that they do not change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import jax
from jax import Array

from decodax.cache.scratch import Scratch
from decodax.core.cache import Cache, Draftable, Entries, Feature, PyTree, ReadPrompt


class Wrapper(Cache):
    """Forwards everything to `base`. Derive a `@struct` with a field `base`, and override what changes."""

    if TYPE_CHECKING:
        base: Any

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return self.base.supports

    @property
    def by_row(self) -> bool:       # type: ignore[override]
        return self.base.by_row

    @property
    def capacity(self) -> int:
        return self.base.capacity

    @property
    def length(self) -> Array:
        return self.base.length

    @property
    def inputs(self) -> PyTree:
        return self.base.inputs

    @property
    def hosted(self) -> PyTree:
        return self.base.hosted

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        return self.base.attend(layer, q, k, v, window, **options)

    def commit(self, entries: Entries, slots: Array) -> Self:
        return self.replace(base=self.base.commit(entries, slots))

    def select(self, rows: Array) -> Self:
        rest = jax.tree.map(lambda x: x[rows], self.replace(base=None))
        return rest.replace(base=self.base.select(rows))

    def truncate(self, length: Array) -> Self:
        return self.replace(base=self.base.truncate(length))

    def for_prompt(self) -> Self:
        return self.replace(base=self.base.for_prompt())

    def settled(self, prompt: ReadPrompt) -> Self:
        return self.replace(base=self.base.settled(prompt))

    @property
    def reads(self) -> int | None:
        return self.base.reads

    @property
    def view(self) -> Cache:
        return self.replace(base=self.base.view)

    def view_of(self, kind: Any) -> Cache:
        return self.replace(base=self.base.view_of(kind))

    def scratch(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)

    def room(self, running: Array) -> Array | None:
        return self.base.room(running)

    def horizon(self) -> Array | None:
        return self.base.horizon()

    def stale(self) -> Array | None:
        return self.base.stale()

    def renewed(self, text: ReadPrompt, rows: Array) -> Self:
        return self.replace(base=self.base.renewed(text, rows))
