"""Frozen dataclasses that JAX walks as pytrees: the one way state is written down in this project."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import reprlib
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import numpy as np

T = TypeVar("T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the type, not of the data: hashable, compared by value, recompiles when it changes."""
    return dataclasses.field(default=default, metadata={"static": True})


REPR = 400
"""Characters of `short` at most."""


def short(value: Any) -> str:
    """A dataclass in one line, whatever it holds: arrays by dtype and shape, what is nested by its first parts. A class
    takes it by `__repr__ = short`.

    >>> @struct
    ... class Pair(Struct):
    ...     tokens: Any
    ...     name: str
    >>> Pair(jax.numpy.zeros((2, 3)), "a")
    Pair(tokens=float32[2, 3], name='a')
    """
    said = _named(value, 2)
    return said if len(said) <= REPR else f"{said[:REPR - 4]}...)"


def _named(value: Any, depth: int) -> str:
    shown = [f for f in dataclasses.fields(value) if f.repr and f.name != "_class"] if depth else []
    parts = ", ".join(f"{f.name}={_part(getattr(value, f.name), depth - 1)}" for f in shown)
    return f"{type(value).__qualname__}({parts if depth else '...'})"


def _part(value: Any, depth: int) -> str:
    """A value inside: `depth` levels of dataclasses and collections are opened."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}" if np.ndim(value) else f"{value.dtype}"
    own = type(value).__repr__
    if dataclasses.is_dataclass(type(value)) and (own is short or hasattr(own, "__wrapped__")):
        return _named(value, depth)
    if type(value) in (list, tuple, dict):
        around = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        if value and depth <= 0:
            return f"{around[0]}{len(value)} entries{around[1]}"
        parts = [f"{name!r}: {_part(x, depth - 1)}" for name, x in itertools.islice(value.items(), 3)] if isinstance(
            value, dict) else [_part(x, depth - 1) for x in value[:3]]
        return around[0] + ", ".join(parts + [f"... {len(value)} in all"] * (len(value) > 3)) + around[1]
    whole = reprlib.repr(value) if isinstance(value, (str, bytes, set, frozenset)) else repr(value)
    return whole if len(whole) <= 200 else f"{whole[:196]}...>"


class Struct:
    """Base of every pytree dataclass: adds `replace`, and a short `repr`."""

    __repr__ = short

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
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls))


def fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The declared fields of a struct, class or instance."""
    return [f for f in dataclasses.fields(cls) if f.name != "_class"]
