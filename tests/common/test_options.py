"""Options by name: a value of another kind is refused by the option's name, whoever takes it."""

import re
from collections.abc import Callable
from typing import Any, Literal

import pytest

from decodax.common.options import check_options


class Thing:
    pass


def make(length: int = 3, share: float = 0.5, pick: Literal["first", "last"] = "last", on: bool = False,
         name: str | None = None, sizes: tuple[int, ...] = (), reward: Callable[..., Any] | None = None,
         free: Any = None, keep: int | str = 3) -> None:
    """Options of every kind."""


@pytest.mark.parametrize(("given", "takes"), [
    (dict(length="abc"), "a whole number"), (dict(length=True), "a whole number"), (dict(length=1.5), "a whole number"),
    (dict(share="a"), "a number"), (dict(share=False), "a number"), (dict(pick="best"), "'first' or 'last'"),
    (dict(on=1), "True or False"), (dict(name=3), "a text or None"), (dict(sizes=3), "a tuple of whole numbers"),
    (dict(sizes="ab"), "a tuple of whole numbers"), (dict(reward=3), "a function or None"),
    (dict(keep=2.5), "a whole number or a text")])
def test_a_value_of_another_kind_is_refused(given: dict[str, Any], takes: str) -> None:
    (name, value), = given.items()
    with pytest.raises(ValueError, match=f"^{name}: got {re.escape(repr(value))}, takes {re.escape(takes)}$"):
        check_options(make, given)


def test_a_value_of_the_kind_is_taken() -> None:
    check_options(make, dict(length=4, share=1, pick="first", on=True, name=None, sizes=(1, 2), reward=len,
                             free=Thing(), keep="all"))
    check_options(len, {"x": 3})
