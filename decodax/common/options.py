"""Options of methods, caches, searches and rules, held against the annotations of what takes them: a value of another
kind is refused by name, before it meets a comparison in somebody's constructor."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from decodax.common.arguments import is_whole, shown

WORDS: dict[Any, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a text",
                         type(None): "None"}


def built(make: Callable[..., Any], options: Mapping[str, Any], **beside: Any) -> Any:
    """What `make` makes of options, and of what stands beside them.

    Raises:
        ValueError: an option of another kind (`check_options`), unless `make` has an error about it that begins with
            its name; or as `make`.
    """
    try:
        found = make(**beside, **options)
    except Exception as error:
        if not (isinstance(error, ValueError) and str(error).startswith(tuple(options))):
            check_options(make, options)
        raise
    check_options(make, options)
    return found


def check_options(make: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Checks options by type: numbers, texts, True and False, one of several texts, tuples of them, and functions.
    What is annotated as anything else is left to `make`.

    Raises:
        ValueError: an option of another kind; says what it takes.

    >>> def make(length: int = 3, pick: Literal["first", "last"] = "last") -> None: ...
    >>> check_options(make, {"length": "abc"})
    Traceback (most recent call last):
    ValueError: length: got 'abc', takes a whole number
    """
    hints = _hints(make)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"{name}: got {shown(value)}, takes {' or '.join(dict.fromkeys(_words(hints[name])))}")


@functools.lru_cache(maxsize=512)
def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    function: Any = make.__init__ if inspect.isclass(make) else make
    found = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        with contextlib.suppress(NameError):        # of names that only type checkers see
            found[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return found


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, (str, int, float, bool, type(None))) and value in parts
    if origin in (tuple, list, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str)
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
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for part in parts for word in _words(part)]
    if origin is Literal:
        return list(map(repr, parts))
    if origin in (tuple, list, Sequence):
        inner = [word for part in parts for word in _words(part) if part is not Ellipsis]
        return ["a tuple" + (f" of {' or '.join(dict.fromkeys(inner))}" if inner else "")]
    return [WORDS.get(hint, "a function" if origin is Callable or hint is Callable else getattr(hint, "__name__",
                                                                                                str(hint)))]
