"""Checks of users' own classes and of what these return, made where they are handed in or traced: an error names the
class and says what it takes, before JAX says so in its own words."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS: dict[str, Any] = {"i": jnp.integer, "b": jnp.bool_, "f": jnp.floating}


def hashable(name: str, value: Any, path: str | None = None) -> None:
    """Checks that a value can be static under jit.

    Args:
        name: begins the error. path: the value's name in the error; default its type.

    Raises:
        TypeError: it cannot be compared by value; names the field that is to blame.
    """
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name}: {_blame(value, path or type(value).__name__)}; takes frozen dataclasses of numbers, "
                        "texts, functions and tuples. Arrays are data: they belong in `weights` or in the state"
                        ) from None


def _blame(value: Any, path: str) -> str:
    """Why a value cannot be hashed."""
    parts: list[tuple[str, Any]] = []
    if dataclasses.is_dataclass(value):
        name = type(value).__name__
        parts = [(f"{name}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)
                 if (f.compare if f.hash is None else f.hash)]
    elif isinstance(value, tuple):
        parts = [(f"{path}[{i}]", part) for i, part in enumerate(value)]
    for where, part in parts:
        try:
            hash(part)
        except TypeError:
            return _blame(part, where)
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__} is a dataclass without frozen=True"
    return f"{path} is of type {type(value).__name__}, which cannot be hashed"


def pair(who: str, given: Any, takes: str) -> Any:
    """Returns `given`, which `who` returned, if it is a pair.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{who}: returned {kind(given)}, takes a pair, {takes}")
    return given


def instance(who: str, given: Any, of: type | tuple[type, ...], takes: str) -> Any:
    """Returns `given`, which `who` returned, if it is an instance of a class.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(given, of):
        raise TypeError(f"{who}: returned {kind(given)}, takes {takes}")
    return given


def array(who: str, name: str, given: Any, form: str, sizes: dict[str, int]) -> None:
    """Checks an array that `who` returned.

    Args:
        form: kind and shape, such as "i[B or 1, N]"; kinds are i, b and f. sizes: sizes by letter; a letter that
            is not among them is added.

    Raises:
        TypeError: no array, or one of another kind or shape.

    >>> array("Again.propose", "tokens", np.zeros((2, 3)), "i[B, N]", {"B": 2})
    Traceback (most recent call last):
    TypeError: Again.propose: got tokens of float64[2, 3], takes i[B, N] with B=2
    """
    letters = [letter.strip() for letter in form[2:-1].split(",")]
    known = ", ".join(f"{letter}={size}" for letter, size in sizes.items() if letter in {x[0] for x in letters})
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    good = shape is not None and dtype is not None and len(shape) == len(letters) and jnp.issubdtype(
        dtype, KINDS[form[0]])
    for size, letter in zip(shape or (), letters, strict=False):
        letter, _, one = letter.partition(" or ")
        if not (one and size == 1):
            good &= sizes.setdefault(letter, size) == size
    if not good:
        raise TypeError(f"{who}: got {name} of {kind(given)}, takes {form}" + (f" with {known}" if known else ""))


def arrays(who: str, given: Any, of: type, takes: str, forms: dict[str, str], sizes: dict[str, int]) -> Any:
    """Returns `given`, which `who` returned, if it is an instance of a class whose fields are arrays of some forms.

    Args:
        takes: words for the class, such as "a Window". forms: form of each array by the name of its field, and
            sizes: sizes by letter, as in `array`.

    Raises:
        TypeError: it is none, or a field is no such array.
    """
    instance(who, given, of, takes)
    for name, form in forms.items():
        array(who, name, getattr(given, name), form, sizes)
    return given


def statics(name: str, given: Any) -> None:
    """Checks the static fields of a struct, which are part of its type under jit.

    Raises:
        TypeError: one cannot be compared by value, as an array.
    """
    for field in dataclasses.fields(given):
        if field.metadata.get("static"):
            hashable(name, getattr(given, field.name), f"{type(given).__name__}.{field.name}, a static field,")


def same_form(who: str, what: str, new: Any, old: Any) -> None:
    """Checks that a round returns the carry of a loop in the form in which it took it.

    Raises:
        TypeError: another structure, or an array of another shape or dtype; names the first.
    """
    leaves = lambda tree: {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    before, after = leaves(old), leaves(new)
    for path in {**before, **after}:
        a, b = before.get(path), after.get(path)
        if a is None or b is None or np.shape(a) != np.shape(b) or (
                not getattr(a, "weak_type", False) and _dtype(a) != _dtype(b)):
            said = lambda x: "nothing" if x is None else kind(x)
            raise TypeError(f"{who}: {what}{path} was {said(a)} before a round and is {said(b)} after it; takes the "
                            "same shapes and dtypes in every round")


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def kind(value: Any) -> str:
    """A value by its type, an array by dtype and shape, a tuple by its parts."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if type(value) is tuple:
        return f"({', '.join(map(kind, value))}{',' * (len(value) == 1)})"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
