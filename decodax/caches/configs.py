"""Parts that the configs of several shelves share: options are checked when a config is built, and errors have one
wording."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from decodax.cache.key_values import KVConfig
from decodax.common.options import check_options

T = TypeVar("T")


class PaperConfig(KVConfig):
    """Base of configs that are registry entries: derive a frozen dataclass whose fields are the options of the paper.

    Each field is checked against its annotation when the config is built, so that `caches.quest(budget=0)` is refused
    as `"quest:budget=0"` is. A field whose name begins with an underscore is no option: `generate` fills it in.

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
    """Returns an option that has to be of one class.

    Raises:
        ValueError: it is not; `takes` says what is.
    """
    if not isinstance(given, kind):
        raise ValueError(f"{option}: got {'none' if given is None else type(given).__name__}, takes {takes}")
    return given
