"""Options by name: a value of another kind is refused by the option's name, whoever takes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

import decodax as dx
from decodax.common.options import check_options
from decodax.common.registry import ALGORITHMS, CACHES


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


def by_type(options: Mapping[str, Any], kinds: tuple[type, ...]) -> list[str]:
    return [name for name, option in options.items() if type(option.default) in kinds]


@pytest.mark.parametrize("name", CACHES)
def test_options_of_caches_are_held_to_their_kind(name: str) -> None:
    needed = {key: 1.0 for key, option in CACHES[name].options.items() if not option.optional}
    for option in by_type(CACHES[name].options, (int, float, bool)):
        with pytest.raises(ValueError, match=rf"^{option}\b.*: got .*, takes "):
            dx.caches.make(name, **needed, **{option: Thing()})


def test_options_of_systems_are_held_to_their_kind() -> None:
    for name, entry in ALGORITHMS.items():
        given: dict[str, Any] = {} if entry.needs == "nothing" else {"lm": Thing(), "draft": Thing()}
        known = inspect.signature(entry.make).parameters
        required = {option: Thing() for option, takes in entry.options.items() if not takes.optional}
        for option in [option for option in entry.options if known[option].annotation in ("int", "float", "bool")]:
            with pytest.raises(ValueError, match=rf"^{option}: got .*Thing.*, takes "):
                dx.algorithms.make(name, **given, **{option: Thing(), **required})
