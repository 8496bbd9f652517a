"""What decoding methods and drafts have in common: each may be made of others."""

from __future__ import annotations

import dataclasses
from typing import Any, Self


class Composed:
    """A method or a draft that may be made of others (its `parts`), which are fields of it or stand in a tuple that is.

    What is asked of the whole is asked of its parts, unless it answers otherwise: so a wrapper of another draft, or of
    another method, loses nothing of it by saying nothing.
    """

    @property
    def parts(self) -> tuple[Any, ...]:
        """The methods and drafts that it is made of, in the order of its fields."""
        return tuple(x for value in _fields(self).values() for x in (value if isinstance(value, tuple) else (value,))
                     if isinstance(x, Composed))

    @property
    def weights(self) -> Any:
        """Weights that it was made with, a pytree: what becomes `Params.draft`. By default those of its part, a tuple
        of those of several parts, and None without any."""
        each = tuple(part.weights for part in self.parts)
        return each[0] if len(each) == 1 else each or None

    def bare(self) -> Self:
        """The same without those weights, as the compiled programs take it."""
        return self._with(lambda part: part.bare())

    def fit(self, budget: int) -> Self:
        """The same for texts of at most `budget` new tokens, where it left a size open."""
        return self._with(lambda part: part.fit(budget))

    def through(self, model: Any) -> Any:
        """The target's model as it is run: a model that wraps the given one may run its layers in another way, and keep
        more than keys and values in its cache."""
        for part in self.parts:
            model = part.through(model)
        return model

    def _with(self, change: Any) -> Self:
        """The same with other parts."""
        one = lambda x: change(x) if isinstance(x, Composed) else x
        new = {name: tuple(map(one, value)) if isinstance(value, tuple) else one(value)
               for name, value in _fields(self).items() if _composed(value)}
        return dataclasses.replace(self, **new) if new else self     # type: ignore[type-var]


def _composed(value: Any) -> bool:
    return any(isinstance(x, Composed) for x in (value if isinstance(value, tuple) else (value,)))


def _fields(whole: Any) -> dict[str, Any]:
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else ()
    return {field.name: getattr(whole, field.name) for field in fields}
