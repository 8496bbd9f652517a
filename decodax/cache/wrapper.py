"""A cache around another one: what it does not change, it forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import jax
from jax import Array

from decodax.cache.scratch import Scratch
from decodax.core.cache import Cache, Draftable, Entries, Feature, PyTree, ReadPrompt


class Wrapper(Cache):
    """A cache that keeps more than `base`: derive a `@struct` with a field `base` from this, and override `commit`."""

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

    def prefill_cache(self) -> Self:
        return self.replace(base=self.base.prefill_cache())

    def finish_prefill(self, prompt: ReadPrompt) -> Self:
        return self.replace(base=self.base.finish_prefill(prompt))

    @property
    def reads(self) -> int | None:
        return self.base.reads

    @property
    def view(self) -> Cache:
        return self.replace(base=self.base.view)

    def view_of(self, kind: Any) -> Cache:
        return self.replace(base=self.base.view_of(kind))

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)

    def room(self, running: Array) -> Array | None:
        return self.base.room(running)

    def max_commit(self) -> Array | None:
        return self.base.max_commit()

    def needs_refresh(self) -> Array | None:
        return self.base.needs_refresh()

    def refresh(self, text: ReadPrompt, rows: Array) -> Self:
        return self.replace(base=self.base.refresh(text, rows))
