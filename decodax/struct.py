"""Frozen dataclasses that JAX walks as pytrees: the one way state is written down in this project."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the type, not of the data: hashable, compared by value, recompiles when it changes."""
    return dataclasses.field(default=default, metadata={"static": True})


class Struct:
    """Base of every pytree dataclass: adds `replace`."""

    def replace(self, **changes: Any) -> Self:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def struct(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and a pytree; fields declared with `static()` go into the tree's definition."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))
