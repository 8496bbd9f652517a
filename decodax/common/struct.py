"""Frozen dataclasses that are JAX pytrees. All state in this project consists of them."""

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
    """Declares a field that is part of the pytree's structure and not of its data. Its value must be hashable and is
    compared by value; another value causes a new compilation."""
    return dataclasses.field(default=default, metadata={"static": True})


REPR = 400
"""Maximum number of characters that `short` returns."""


def short(value: Any) -> str:
    """Returns a dataclass as one line: arrays by dtype and shape, nested values by their first parts. A class uses it
    by `__repr__ = short`.

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
    """Formats a value inside another one. `depth` is the number of nested levels that are shown."""
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
    """Base class of all pytree dataclasses: adds `replace` and a short `repr`."""

    __repr__ = short

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with the given fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def struct(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and a pytree; fields declared with `static()` are part of the pytree's structure.

    The class itself is part of the structure as well, as the field `_class`. Without it, JAX (0.10 and 0.12) considers
    the structures of two registered dataclasses equal if their static fields are equal, whatever their classes. The
    cache of `jit` in JAX 0.10 compares a few bits of a hash before it compares structures, so it would sometimes run
    the program of another class (44 of 300 cases).
    """
    cls.__annotations__ = {**inspect.get_annotations(cls), "_class": "type"}
    cls._class = dataclasses.field(default=cls, kw_only=True, repr=False, metadata={"static": True})  # type: ignore[attr-defined]
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls))


def fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Returns the declared fields of a struct, given as a class or an instance."""
    return [f for f in dataclasses.fields(cls) if f.name != "_class"]
