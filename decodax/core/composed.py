"""The base of decoding methods and drafts, each of which may be made of others."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np


def data(default: Any = None, bare: Any = None, **field: Any) -> Any:
    """Declares a field of a method or a draft as data: the value is an argument of the compiled programs and may change
    without a new compilation.

    Args:
        default: of the field. Arrays and other pytrees are left out of comparison and of the representation; numbers
            are not.
        bare: value of the field in the compiled programs, which find the true one in `Params.draft`.
        field: further arguments of `dataclasses.field`.
    """
    if not isinstance(bare, (int, float)):
        field = {"compare": False, "repr": False, **field}
    return dataclasses.field(default=default, metadata={"bare": bare}, **field)


class Composed:
    """A method or a draft that may be made of others, its parts: fields of it, or members of a field that is a tuple.

    Each member of this class is by default answered from the parts and from the fields that are declared as `data`. So
    a wrapper that overrides nothing keeps the weights, the sizes and the cache of what it wraps.
    """

    @property
    def weights(self) -> Any:
        """Weights and numbers that are arguments of the compiled programs, a pytree, which becomes `Params.draft`. By
        default those of its parts, then its `data` fields: the only one as it is, several as a tuple, without any
        None."""
        own = (getattr(self, name) for name in _data(self))
        each = (*(part.weights for part in parts_of(self)),
                *(np.float32(x) if isinstance(x, (int, float)) else x for x in own))
        return each[0] if len(each) == 1 else each or None

    def bare(self) -> Self:
        """The same without those weights, as the compiled programs take it."""
        new = self._with(lambda part: part.bare())
        return dataclasses.replace(new, **declared) if (declared := _data(self)) else new   # type: ignore[type-var]

    def fit(self, budget: int) -> Self:
        """The same for texts of at most `budget` new tokens, where it left a size open."""
        return self._with(lambda part: part.fit(budget))

    def through(self, model: Any) -> Any:
        """The target's model as it is run: a model that wraps the given one may run its layers in another way, and keep
        more than keys and values in its cache. By default the parts wrap it one after another."""
        for part in parts_of(self):
            model = part.through(model)
        return model

    def _with(self, change: Any) -> Self:
        """The same with `change(part)` in place of each part."""
        one = lambda x: change(x) if isinstance(x, Composed) else x
        new = {name: tuple(map(one, value)) if isinstance(value, tuple) else one(value)
               for name, value in _fields(self).items() if _composed(value)}
        return dataclasses.replace(self, **new) if new else self     # type: ignore[type-var]


def _data(whole: Any) -> dict[str, Any]:
    """Returns the names of the `data` fields, with the values that stand for them in compiled programs."""
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else ()
    return {field.name: field.metadata["bare"] for field in fields if "bare" in field.metadata}


def _composed(value: Any) -> bool:
    return any(isinstance(x, Composed) for x in (value if isinstance(value, tuple) else (value,)))


def _fields(whole: Any) -> dict[str, Any]:
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else ()
    return {field.name: getattr(whole, field.name) for field in fields}


def parts_of(whole: Composed) -> tuple[Any, ...]:
    """Returns the methods and drafts that a method is made of, in the order of its fields."""
    return tuple(x for value in _fields(whole).values() for x in (value if isinstance(value, tuple) else (value,))
                 if isinstance(x, Composed))
