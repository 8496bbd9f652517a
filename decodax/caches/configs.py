"""Parts that cache configs share: options are checked when a config is built, and errors have one wording."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from decodax.cache.key_values import KVConfig
from decodax.common.options import check_options

T = TypeVar("T")


class PaperConfig(KVConfig):
    """Base of configs that are registry entries. Derive a frozen dataclass whose fields are the options of the paper.

    Each field is checked against its annotation when the config is built, so `caches.quest(budget=0)` raises the same
    error as the string `"quest:budget=0"`. A field whose name begins with an underscore is not an option: `generate`
    sets it.

    Attributes:
        name: name of the entry, for error messages.
    """

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Name of the entry; derived classes declare a class variable."""

    def __post_init__(self) -> None:
        assert dataclasses.is_dataclass(self)
        check_options(type(self), {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def taken(option: str, given: Any, kind: type[T], takes: str) -> T:
    """Returns `given`, the value of an option, if it is of class `kind`.

    Args:
        option: name of the option, for the error.
        given: the value of the option.
        kind: the required class.
        takes: description of what the option takes, for the error.

    Raises:
        ValueError: `given` is not of class `kind`.
    """
    if not isinstance(given, kind):
        raise ValueError(f"{option}: got {'none' if given is None else type(given).__name__}, takes {takes}")
    return given
