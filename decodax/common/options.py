"""Options of the entries of the registry. The annotation of a parameter says which values it takes; they are checked
before anything is made.

An annotation may contain a range: `Annotated[int, Range(1)]`. `Count`, `Whole`, `Odd`, `Share`, `Positive`,
`NonNegative` and `TokenId` are short for common ones. The items of a tuple may have a range, too: `tuple[Count, ...]`
takes a tuple of any length, and `tuple[Count, Count]` takes two items.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import numbers
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from decodax.common.arguments import is_whole, shown

WORDS: dict[Any, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a text",
                         type(None): "None"}

REQUIRED = inspect.Parameter.empty
"""Default of an option that has to be given."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`.

    Attributes:
        low: lower bound; None: no bound.
        high: upper bound; None: no bound.
        above: True excludes `low` itself.
        below: True excludes `high` itself.
        odd: True excludes even numbers.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    odd: bool = False

    def __contains__(self, value: float) -> bool:
        return ((self.low is None or value > self.low or (value == self.low and not self.above))
                and (self.high is None or value < self.high or (value == self.high and not self.below))
                and (value % 2 == 1 or not self.odd))

    def __str__(self) -> str:
        """Returns the range in words.

        >>> str(Range(1)), str(Range(0, 1)), str(Range(0, above=True)), str(Range(0, 1, below=True))
        ('from 1', 'from 0 to 1', 'above 0', 'from 0 and below 1')
        >>> str(Range(1, odd=True))
        'from 1, odd'
        """
        low = None if self.low is None else f"{'above' if self.above else 'from'} {self.low:g}"
        high = None if self.high is None else f"{'below' if self.below else 'to'} {self.high:g}"
        joint = " " if not (self.above or self.below) else " and "
        return joint.join(part for part in (low, high) if part) + ", odd" * self.odd


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Odd = Annotated[int, Range(1, odd=True)]


@dataclasses.dataclass(frozen=True)
class Named:
    """Says in an annotation what a number is.

    Attributes:
        word: its kind with an article, such as "a token id".
    """

    word: str


TokenId = Annotated[int, Range(0), Named("a token id")]


@dataclasses.dataclass(frozen=True)
class InFile:
    """Marks an option whose value may be in a file: in a string, the value may be the path of a file."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of an entry.

    Attributes:
        default: its default value; `REQUIRED` if it has to be given.
        hint: its annotation, or None.
    """

    default: Any
    hint: Any = None

    @property
    def optional(self) -> bool:
        """True if it has a default."""
        return self.default is not REQUIRED

    def __str__(self) -> str:
        takes = " or ".join(word for word in dict.fromkeys(_words(self.hint)) if word)
        said = getattr(self.default, "__name__", None) or shown(self.default)
        default = f"default {said}" if self.optional else "has to be given"
        return f"{takes}; {default}" if takes else default


def options_of(make: Callable[..., Any]) -> dict[str, Option]:
    """Returns the options by name: the parameters of a function, or the fields of a dataclass, except fields whose
    names begin with an underscore."""
    hints = _hints(make)
    if inspect.isclass(make) and dataclasses.is_dataclass(make):
        found = {}
        for field in sorted(dataclasses.fields(make), key=lambda field: field.kw_only is True):
            if field.init and not field.name.startswith("_"):
                factory: Any = field.default_factory
                default = field.default if factory is dataclasses.MISSING else factory()
                found[field.name] = Option(REQUIRED if default is dataclasses.MISSING else default,
                                           hints.get(field.name))
        return found
    return {p.name: Option(p.default, hints.get(p.name)) for p in inspect.signature(make).parameters.values()}


def built(make: Callable[..., Any], options: Mapping[str, Any], **beside: Any) -> Any:
    """Calls `make` with options and other arguments, and returns the result.

    Args:
        make: the function or class.
        options: the options by name; their kinds and ranges are checked.
        beside: further arguments, which are not checked.

    Raises:
        ValueError: an option of another kind or out of its range; or as in `make`. An error of `make` that begins with
            the name of an option takes precedence.
    """
    try:
        found = make(**beside, **options)
    except Exception as error:
        if not (isinstance(error, ValueError) and (said := re.match(r"\w+", str(error))) and said[0] in options):
            check_options(make, options)
        raise
    check_options(make, options)
    return found


def check_options(make: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Checks options by their annotations: numbers and their ranges, texts, True and False, one of several texts,
    tuples of these, and functions. Options with other annotations are not checked.

    Raises:
        ValueError: an option of another kind, or out of its range; the message says what it takes.

    >>> def make(length: Count = 3, pick: Literal["first", "last"] = "last") -> None: ...
    >>> check_options(make, {"length": "abc"})
    Traceback (most recent call last):
    ValueError: length: got 'abc', takes a whole number from 1
    >>> check_options(make, {"length": 0})
    Traceback (most recent call last):
    ValueError: length: got 0, takes a whole number from 1
    """
    hints = _hints(make)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"{name}: got {shown(value)}, takes {' or '.join(dict.fromkeys(_words(hints[name])))}")


class Checked:
    """Base of frozen dataclasses that checks fields against their annotations when an object is made.

    Raises:
        ValueError: a field is of another type or out of its range.
    """

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))


@functools.lru_cache(maxsize=512)
def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    if inspect.isclass(make) and dataclasses.is_dataclass(make):     # a field may be inherited from another module
        owners = [(inspect.get_annotations(c), vars(sys.modules[c.__module__])) for c in reversed(make.__mro__)]
    else:
        function: Any = make.__init__ if inspect.isclass(make) else make
        owners = [(getattr(function, "__annotations__", {}), getattr(function, "__globals__", {}))]
    found = {}
    for hints, names in owners:
        for name, hint in hints.items():
            with contextlib.suppress(NameError):        # of names that only type checkers see
                found[name] = eval(hint, names) if isinstance(hint, str) else hint
    return found


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, parts[0]) and all(value in part for part in parts[1:] if isinstance(part, Range))
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, (str, int, float, bool, type(None))) and value in parts
    if origin in (tuple, list, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        alike = origin is not tuple or Ellipsis in parts
        if not alike and len(value) != len(parts):
            return False
        if alike and len(value) > 64 and set(map(type, value)) == {int}:      # a long text: its bounds suffice
            value = min(value), max(value)
        return all(map(_fits, value, itertools.repeat(parts[0]) if alike else parts))
    if origin is Callable or hint is Callable:
        return callable(value)
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return is_whole(value)
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, type(None)) else True


def _words(hint: Any) -> list[str]:
    """Returns the kinds of values that an annotation allows, in words; an empty list if it allows all values."""
    if hint in (None, Any):
        return []
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if named := [part.word for part in parts[1:] if isinstance(part, Named)]:
            return named
        bounds = [str(part) for part in parts[1:] if isinstance(part, Range)]
        bounds += ["(in a string, or its file)" for part in parts[1:] if isinstance(part, InFile)]
        return [" ".join([word, *bounds]) for word in _words(parts[0])]
    if origin in (Union, types.UnionType):
        return [word for part in parts for word in _words(part)]
    if origin is Literal:
        return list(map(repr, parts))
    if origin in (tuple, list, Sequence):
        each = [" or ".join(_words(part)) or "any value" for part in parts if part is not Ellipsis]
        if len(set(each)) > 1:
            return [f"a tuple of {', '.join(each[:-1])} and {each[-1]}"]
        number = f"{len(parts)} " if origin is tuple and Ellipsis not in parts else ""
        inner = " or ".join(dict.fromkeys(map(_plural, _words(parts[0] if parts else Any))))
        return [f"a tuple of {number}{inner or 'values'}" if inner or number else "a tuple"]
    return [WORDS.get(hint, "a function" if origin is Callable or hint is Callable else getattr(hint, "__name__",
                                                                                                str(hint)))]


def _plural(word: str) -> str:
    """Turns the words for one value of a kind into words for several.

    >>> _plural("a whole number from 1"), _plural("'mean'")
    ('whole numbers from 1', "'mean'")
    """
    return re.sub(r"^an? (token id|whole number|number|text|tuple|function)\b", r"\1s", word)
