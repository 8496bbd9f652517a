"""Base class of decoding methods and drafts, which may contain other methods and drafts."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np


def data(default: Any = None, bare: Any = None, **field: Any) -> Any:
    """Declares a dataclass field of a method or a draft as data: its value is an argument of the compiled programs and
    may change without a new compilation.

    Args:
        default: default value of the field.
        bare: placeholder of the field in the method that is static under jit; the real value is in `Params.draft`. If
            it is a number, the field takes part in comparison and `repr`; otherwise it does not.
        field: further arguments of `dataclasses.field`.
    """
    if not isinstance(bare, (int, float)):
        field = {"compare": False, "repr": False, **field}
    return dataclasses.field(default=default, metadata={"bare": bare}, **field)


class Composed:
    """A method or a draft that may have parts: other methods and drafts, in its fields or in fields that are tuples.

    By default each member of this class combines the results of the parts with the fields declared as `data`. So a
    wrapper that overrides nothing keeps the weights, sizes and cache of what it wraps.
    """

    @property
    def weights(self) -> Any:
        """Weights and numbers that are arguments of the compiled programs, a pytree that becomes `Params.draft`. By
        default the weights of the parts, then the `data` fields: one value as it is, several as a tuple; None if there
        are none."""
        own = (getattr(self, name) for name in _data(self))
        each = (*(part.weights for part in parts_of(self)),
                *(np.float32(x) if isinstance(x, (int, float)) else x for x in own))
        return each[0] if len(each) == 1 else each or None

    def bare(self) -> Self:
        """Returns this method without its weights: `data` fields are replaced by placeholders, so that it is static
        under jit."""
        new = self._with(lambda part: part.bare())
        return dataclasses.replace(new, **declared) if (declared := _data(self)) else new   # type: ignore[type-var]

    def with_length(self, budget: int) -> Self:
        """Returns this method with sizes that were left open (None) set for texts of at most `budget` new tokens."""
        return self._with(lambda part: part.with_length(budget))

    def for_target(self, model: Any) -> Self:
        """Returns this method with what it needs of the target's network. What it already has of one, it keeps.

        Args:
            model: the target: a `Model`, or the result of `decodax.load`.

        Raises:
            ValueError: the method cannot run on this target.
        """
        return self._with(lambda part: part.for_target(model))

    def wrap_model(self, model: Any) -> Any:
        """Returns the target model as the method runs it. A method may wrap it to run its layers in another way, or to
        keep more than keys and values in its cache. By default each part wraps the result of the part before it."""
        for part in parts_of(self):
            model = part.wrap_model(model)
        return model

    def _with(self, change: Any) -> Self:
        """Returns this method with each part replaced by `change(part)`."""
        one = lambda x: change(x) if isinstance(x, Composed) else x
        new = {name: tuple(map(one, value)) if isinstance(value, tuple) else one(value)
               for name, value in _fields(self).items() if _composed(value)}
        return dataclasses.replace(self, **new) if new else self     # type: ignore[type-var]


def _data(whole: Any) -> dict[str, Any]:
    """Returns the names of the `data` fields with their placeholders."""
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else ()
    return {field.name: field.metadata["bare"] for field in fields if "bare" in field.metadata}


def _composed(value: Any) -> bool:
    return any(isinstance(x, Composed) for x in (value if isinstance(value, tuple) else (value,)))


def _fields(whole: Any) -> dict[str, Any]:
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else ()
    return {field.name: getattr(whole, field.name) for field in fields}


def parts_of(whole: Composed) -> tuple[Any, ...]:
    """Returns the values of a method's fields that are themselves methods or drafts (`Composed`), also from fields that
    are tuples, in the order of the fields."""
    return tuple(x for value in _fields(whole).values() for x in (value if isinstance(value, tuple) else (value,))
                 if isinstance(x, Composed))
