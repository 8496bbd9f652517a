"""Checks of classes that users write and of the values that these return, made before tracing or during it. An error
names the class and says what it takes, before JAX raises a less helpful one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS: dict[str, Any] = {"i": jnp.integer, "b": jnp.bool_, "f": jnp.floating}


def hashable(name: str, value: Any, path: str | None = None) -> None:
    """Checks that a value can be a static argument under jit.

    Args:
        name: first word of the error.
        value: the value.
        path: name of the value in the error; default its type.

    Raises:
        TypeError: the value cannot be hashed; the error names the field that is the cause.
    """
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name}: {_blame(value, path or type(value).__name__)}; takes frozen dataclasses of numbers, "
                        "texts, functions and tuples. Arrays are data: they belong in `weights` or in the state"
                        ) from None


def _blame(value: Any, path: str) -> str:
    """Returns the reason why a value cannot be hashed, as text for an error."""
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
    """Returns `given` if it is a pair.

    Args:
        who: name of the function that returned `given`, for the error.
        given: the value to check.
        takes: description of the two parts, for the error.

    Raises:
        TypeError: `given` is no pair.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{who}: returned {kind(given)}, takes a pair, {takes}")
    return given


def instance(who: str, given: Any, of: type | tuple[type, ...], takes: str) -> Any:
    """Returns `given` if it is an instance of the class `of`.

    Args:
        who: name of the function that returned `given`, for the error.
        given: the value to check.
        of: a class or a tuple of classes.
        takes: description of the class, for the error.

    Raises:
        TypeError: `given` is no instance.
    """
    if not isinstance(given, of):
        raise TypeError(f"{who}: returned {kind(given)}, takes {takes}")
    return given


def array(who: str, name: str, given: Any, form: str, sizes: dict[str, int]) -> None:
    """Checks dtype and shape of an array.

    Args:
        who: name of the function that returned the array, for the error.
        name: name of the array, for the error.
        given: the value to check.
        form: kind and shape, such as "i[B or 1, N]"; kinds are i (integer), b (bool) and f (float).
        sizes: known sizes by letter. The size of a new letter is added.

    Raises:
        TypeError: `given` is no array, or one of another kind or shape.

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
    """Returns `given` if it is an instance of the class `of` and its fields are arrays of the given forms.

    Args:
        who: name of the function that returned `given`, for the error.
        given: the value to check.
        of: the class.
        takes: description of the class for the error, such as "a Window".
        forms: form of each array (see `array`) by the name of its field.
        sizes: known sizes by letter (see `array`).

    Raises:
        TypeError: `given` is no instance, or a field has another form.
    """
    instance(who, given, of, takes)
    for name, form in forms.items():
        array(who, name, getattr(given, name), form, sizes)
    return given


def draft_weights(given: Any, owner: Any, of: type = object, what: str | None = None) -> Any:
    """Returns `given`, the weights of a method (`Params.draft`).

    Args:
        given: the weights.
        owner: the part of the method that needs them.
        of: their class.
        what: description of the weights for the error; None: the name of the class, or "weights".

    Raises:
        ValueError: there are none, or they are of another class.
    """
    if given is None or not isinstance(given, of):
        what = what or ("weights" if of is object else of.__name__)
        raise ValueError(f"params: {type(owner).__name__} needs its {what} in Params.draft")
    return given


def statics(name: str, given: Any) -> None:
    """Checks that the static fields of a struct can be hashed, since they are part of its type under jit.

    Args:
        name: first word of the error.
        given: the struct.

    Raises:
        TypeError: one of them cannot, for example because it is an array.
    """
    for field in dataclasses.fields(given):
        if field.metadata.get("static"):
            hashable(name, getattr(given, field.name), f"{type(given).__name__}.{field.name}, a static field,")


def same_form(who: str, what: str, new: Any, old: Any) -> None:
    """Checks that a round returns a part of the state with the structure, shapes and dtypes that it got.

    Args:
        who: name of the method or cache, for the error.
        what: name of the part of the state, for the error.
        new: the pytree after the round.
        old: the pytree before the round.

    Raises:
        TypeError: they differ; the error names the first leaf that differs.
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
    """Describes a value by its type for an error message: an array by dtype and shape, a tuple by its parts."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if type(value) is tuple:
        return f"({', '.join(map(kind, value))}{',' * (len(value) == 1)})"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
