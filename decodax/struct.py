"""Frozen dataclasses that JAX walks as pytrees: the one way state is written down in this project."""

from __future__ import annotations

import dataclasses
import inspect
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
    """Makes `cls` a frozen dataclass and a pytree; fields declared with `static()` go into the tree's definition.

    So does the class itself, as the field `_class`: JAX (0.10 and 0.12) takes the definitions of two registered
    dataclasses for equal where their static fields are, whatever their classes, and jit's cache of 0.10, which compares
    a few bits of a hash before it compares definitions, now and then runs the program of another class (44 of 300).
    """
    cls.__annotations__ = {**inspect.get_annotations(cls), "_class": "type"}
    cls._class = dataclasses.field(default=cls, kw_only=True, repr=False, metadata={"static": True})  # type: ignore[attr-defined]
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


def fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The declared fields of a struct, class or instance."""
    return [f for f in dataclasses.fields(cls) if f.name != "_class"]
