"""Base classes of caches that contain other caches. Members of the contract that a derived class does not override are
forwarded to these caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.tree_buffer import TreeBuffer
from decodax.core import capabilities
from decodax.core.cache import Cache, Entries, Feature, Layout, PyTree
from decodax.core.capabilities import (
    Draftable,
    DraftBase,
    HoldsViews,
    LimitsWindow,
    PromptInPart,
    ReadPrompt,
    Refreshes,
    Truncates,
    WholePrompt,
)


class Combined(PromptInPart, WholePrompt, LimitsWindow, Refreshes, Truncates, HoldsViews, DraftBase):
    """A cache that contains one or several other caches, its members: the fields named in `members`.

    Derive a `@struct` and implement `commit`, which passes each member its entries. `attend`, `capacity`, `length`,
    `inputs` and `layers_read` come from the first member. The rest combines all members: a feature is supported if all
    support it, `room` and `max_commit` are the minimum over the members, and a row is refreshed if any member asks for
    it. Fields that are not members must be arrays with a leading batch axis.
    """

    members: ClassVar[tuple[str, ...]]

    @property
    def parts(self) -> tuple[Any, ...]:
        """The member caches themselves, in the order of the field names in `members`."""
        return tuple(getattr(self, name) for name in self.members)

    def each(self, change: Callable[[Any], Any]) -> Self:
        """Returns this cache with each member replaced by `change(member)`."""
        return self.replace(**{name: change(getattr(self, name)) for name in self.members})

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return functools.reduce(frozenset.__and__, (part.supports for part in self.parts))

    @property
    def layout(self) -> Layout:
        layouts = [part.layout for part in self.parts]
        hosted = tuple(layout.hosted for layout in layouts)
        return Layout(by_row=all(layout.by_row for layout in layouts), order=layouts[0].order,
                      hosted=None if all(x is None for x in hosted) else hosted)

    @property
    def capacity(self) -> int:
        return self.parts[0].capacity

    @property
    def length(self) -> Array:
        return self.parts[0].length

    @property
    def inputs(self) -> PyTree:
        return self.parts[0].inputs

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        return self.parts[0].attend(layer, q, k, v, window, **options)

    def select(self, rows: Array) -> Self:
        rest = jax.tree.map(lambda x: x[rows], self.replace(**dict.fromkeys(self.members)))
        return rest.replace(**{name: getattr(self, name).select(rows) for name in self.members})

    def room(self, running: Array) -> Array | None:
        return _all(jnp.minimum, [part.room(running) for part in self.parts])

    def max_commit(self) -> Array | None:
        return _all(jnp.minimum, [part.max_commit() for part in self.parts])

    def truncate(self, length: Array) -> Self:
        return self.each(lambda part: part.truncate(length))

    def prefill_cache(self) -> Self:
        return self.each(capabilities.prefill_cache)

    def finish_prefill(self, prompt: ReadPrompt) -> Self:
        return self.each(lambda part: capabilities.finish_prefill(part, prompt))

    @property
    def layers_read(self) -> int | None:
        for part in self.parts[1:]:
            if capabilities.layers_read(part) is not None:
                part.refuse_whole()
        return capabilities.layers_read(self.parts[0])

    def refuse_whole(self) -> None:
        self.parts[0].refuse_whole()

    def check_windows(self) -> None:
        for part in self.parts:
            if isinstance(part, WholePrompt):
                part.check_windows()

    def check_drafts(self) -> None:
        for part in self.parts:
            if isinstance(part, DraftBase):
                part.check_drafts()

    def check_window(self, nodes: int) -> None:
        for part in self.parts:
            capabilities.check_window(part, nodes)

    def needs_refresh(self) -> Array | None:
        return _all(jnp.logical_or, [capabilities.needs_refresh(part) for part in self.parts])

    def refresh(self, text: ReadPrompt, rows: Array) -> Self:
        def new(part: Any) -> Any:
            stale = capabilities.needs_refresh(part)
            return part if stale is None else part.refresh(text, rows & stale if len(self.members) > 1 else rows)

        return self.each(new)

    def without_views(self) -> Self:
        return self.each(capabilities.without_views)

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return TreeBuffer.empty(self, entries, room)


def _all(combine: Callable[[Array, Array], Array], values: list[Array | None]) -> Array | None:
    """Reduces the values that are not None with `combine`; returns None if all are None."""
    given = [x for x in values if x is not None]
    return functools.reduce(combine, given) if given else None


class Wrapper(Combined):
    """A cache that wraps one other cache, the field `base`, and adds to it. Derive a `@struct` with a field `base`, and
    override the members of the contract that differ from those of `base`."""

    members: ClassVar[tuple[str, ...]] = ("base",)

    if TYPE_CHECKING:
        base: Any

    def commit(self, entries: Entries, slots: Array) -> Self:
        return self.replace(base=self.base.commit(entries, slots))

    def draft_view(self, kind: Any = None) -> Cache:
        return self.replace(base=capabilities.draft_view(self.base, kind))
