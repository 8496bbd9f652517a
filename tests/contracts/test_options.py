"""The contract of options: what every entry of every registry refuses by its declared kinds and ranges.

A value of another kind, a number out of its range and a word that is none of those declared are errors that begin with
the option's name. Bounds that one option sets to another are tested in the module of the method.
"""

import collections.abc
import contextlib
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from decodax.common.options import Range, check_options
from decodax.common.registry import FUNCTIONS, SHELVES, Shelf


class Thing:
    """A value that no option takes."""


def outside(hint: Any) -> list[Any]:
    """Returns values that an annotation does not allow: another kind, the numbers next to its ranges, a tuple that is
    too long, another word."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    bounds = {kind: [x for x in get_args(kind)[1:] if isinstance(x, Range)] for kind in kinds
              if kind in (int, float) or (get_origin(kind) is Annotated and get_args(kind)[0] in (int, float))}
    numbers = [x.low if x.above else x.low - 1 for each in bounds.values() for x in each if x.low is not None]
    numbers += [x.high if x.below else x.high + 1 for each in bounds.values() for x in each if x.high is not None]
    found: list[Any] = [x for x in numbers if not any(all(x in bound for bound in each) for each in bounds.values())]
    found += [Thing()] if bounds or bool in kinds else []
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    found += [(value,) for item in items for value in outside(item)]
    lengths = {len(get_args(kind)) for kind in kinds if get_origin(kind) is tuple and ... not in get_args(kind)}
    found += [(1,) * (max(lengths) + 1)] if lengths and len(lengths) == len(items) else []
    words = any(get_origin(kind) is Literal for kind in kinds) and str not in kinds
    return [*found, "no such word"] if words else found


def fitting(make: Callable[..., Any], option: str) -> Any:
    """Returns a value that an option takes: a number, a text or a function."""
    for value in (1, "text", len):
        with contextlib.suppress(ValueError):
            check_options(make, {option: value})
            return value
    raise NotImplementedError(f"no value for {option}")


CASES = {f"{shelf.kind}-{name}": (shelf, name) for shelf in SHELVES.values() if shelf is not FUNCTIONS for name in shelf
         if any(outside(option.hint) for option in shelf[name].options.values())}


@pytest.mark.parametrize(("shelf", "name"), CASES.values(), ids=list(CASES))
def test_values_outside_of_what_is_declared_are_refused_by_the_name_of_their_option(shelf: Shelf, name: str) -> None:
    options = shelf[name].options
    draft = Thing() if shelf[name].takes_draft else None
    needed = {key: fitting(shelf[name].make, key) for key, option in options.items() if not option.optional}
    for option, declared in options.items():
        for value in outside(declared.hint):
            with pytest.raises(ValueError, match=rf"^[\w, ]*\b{option}\b.*: got .*, takes? "):
                shelf.make(name, Thing(), draft, **{option: value} | needed | {option: value})


ANY_NUMBER = {"length_penalty", "penalty", "states", "gaps", "lengths", "bits", "budget", "tau", "sigma", "t"}
"""Options that take any number, or whose constructor says more than a range could."""


def without_range(hint: Any) -> bool:
    """True if an annotation takes numbers and declares no range of them."""
    if get_origin(hint) is Annotated:
        return not any(isinstance(part, Range) for part in get_args(hint)) and without_range(get_args(hint)[0])
    if get_origin(hint) is Literal or get_origin(hint) is collections.abc.Callable:
        return False
    return hint in (int, float) or any(without_range(part) for part in get_args(hint))


def test_numbers_have_a_declared_range() -> None:
    assert {option for shelf in SHELVES.values() if shelf is not FUNCTIONS for entry in shelf.values()
            for option, declared in entry.options.items() if without_range(declared.hint)} == ANY_NUMBER


def test_an_option_that_has_to_be_given_is_asked_for() -> None:
    for shelf in SHELVES.values():
        for name, entry in shelf.items():
            missing = [option for option, declared in entry.options.items() if not declared.optional]
            if missing:
                with pytest.raises(ValueError, match=f"^{shelf.slot}: '{re.escape(name)}' needs {missing[0]}="):
                    shelf.configure(name)
