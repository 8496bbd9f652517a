"""Options by name: a value of another kind is refused by the option's name, whoever takes it."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest

from decodax.common.options import Checked, Count, Share, check_options
from decodax.common.registry import CACHES


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


@dataclasses.dataclass(frozen=True)
class Sizes(Checked):
    """Options that are tuples."""

    pair: tuple[Count, Count] = (1, 2)
    mixed: tuple[Count, str] = (1, "a")
    one: tuple[Share] = (0.5,)
    either: tuple[Count, Count] | tuple[Count, Count, Count] | None = None
    any: tuple[Count, ...] = ()


@pytest.mark.parametrize(("given", "takes"), [
    (dict(pair=(1, 2, 3)), "a tuple of 2 whole numbers from 1"), (dict(pair=(1,)), "a tuple of 2 whole numbers from 1"),
    (dict(pair=()), "a tuple of 2 whole numbers from 1"), (dict(pair=[1, 2, 3]), "a tuple of 2 whole numbers from 1"),
    (dict(mixed=(1, "a", "b")), "a tuple of a whole number from 1 and a text"),
    (dict(one=(0.5, 0.5)), "a tuple of 1 numbers from 0 to 1"),
    (dict(either=(1, 2, 3, 4)), "a tuple of 2 whole numbers from 1 or a tuple of 3 whole numbers from 1 or None"),
    (dict(any=(1, 0)), "a tuple of whole numbers from 1")])
def test_a_tuple_of_a_declared_length_has_no_other(given: dict[str, Any], takes: str) -> None:
    (name, value), = given.items()
    with pytest.raises(ValueError, match=f"^{name}: got {re.escape(repr(value))}, takes {re.escape(takes)}$"):
        Sizes(**given)


def test_a_tuple_without_a_declared_length_takes_any() -> None:
    for any in ((), (1,), (1, 2, 3), (7,) * 100):
        assert Sizes(any=any, either=(1, 2, 3)).any == any


def test_a_string_that_gives_too_many_items_is_refused() -> None:
    assert CACHES.read("zipcache:bits=(4,2)").build().bits == (4, 2)
    with pytest.raises(ValueError, match=r"^bits: got \(4, 2, 2\), takes a tuple of 2 whole numbers$"):
        CACHES.read("zipcache:bits=(4,2,2)").build()
