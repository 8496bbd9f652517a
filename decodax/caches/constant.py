"""Arrays measured on a model, as options of a method that are compared by value."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np


class Constant:
    """A read-only array that is compared by value. A frozen dataclass that holds it is therefore static under jit, and
    the array becomes a constant of compiled programs.

    Attributes:
        value: the array.
    """

    def __init__(self, value: Any) -> None:
        self.value: np.ndarray = np.array(value)
        self.value.setflags(write=False)

    @functools.cached_property
    def _digest(self) -> tuple[Any, ...]:
        return self.value.shape, str(self.value.dtype), hashlib.sha256(self.value.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"Constant({self.value.dtype}{list(self.value.shape)})"


def measured(name: str, given: Any, kind: type, how: str) -> Any:
    """Returns `given`, an option that has to be measured on a model, if it is of class `kind`.

    Args:
        name: name of the option, for the error.
        given: the value of the option.
        kind: the required class.
        how: name of the function of `decodax.train` that measures the option.

    Raises:
        ValueError: `given` is not of class `kind`.
    """
    if not isinstance(given, kind):
        raise ValueError(f"{name}: got {'none' if given is None else type(given).__name__}, takes what "
                         f"decodax.train.{how} measures on a model")
    return given
