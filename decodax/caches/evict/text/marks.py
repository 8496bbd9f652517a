"""Marks in a text: single token ids, or several in a row, that end a part of it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

Marks = tuple[tuple[int, ...], ...]
"""Marks, each of one id or of several in a row."""


def read_marks(given: Any, name: str) -> Marks:
    """Returns the marks that a user has given: ids, each of which is a mark, or tuples of ids in a row.

    >>> read_marks((3, (1, 2)), "ends")
    ((3,), (1, 2))

    Raises:
        ValueError: `given` is something else. `name` is the argument, for the error.
    """
    several = given if isinstance(given, tuple) else (given,)
    found = tuple(one if isinstance(one, tuple) else (one,) for one in several)
    if not all(one and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in one) for one in found):
        raise ValueError(f"{name}: got {given!r}, takes token ids, or tuples of ids that stand in a row")
    return found


def marked(tokens: Array, marks: Marks) -> Array:
    """Returns the number of ids of the longest mark that ends at each token of `tokens` (`i32[B, N]`), `i32[B, N]`; 0
    where no mark ends.

    >>> marked(jnp.array([[1, 2, 1, 3, 2]]), ((1, 2), (3,)))[0].tolist()
    [0, 2, 0, 1, 0]
    """
    found = jnp.zeros(tokens.shape, jnp.int32)
    for mark in marks:
        here = jnp.ones(tokens.shape, bool)
        for back, i in enumerate(reversed(mark)):
            before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :tokens.shape[1]]
            here &= before == i
        found = jnp.maximum(found, jnp.where(here, len(mark), 0))
    return found


def spelling(lm: Any, within: bytes) -> Marks:
    """Returns the tokens of a model's tokenizer that contain `within`, and its encoding of `within` in several
    tokens."""
    ids = [(i,) for i, piece in enumerate(lm.tokenizer.token_bytes()) if within in piece]
    several = tuple(lm.tokenizer.encode(within.decode(), add_special_tokens=False))
    return tuple(ids) if len(several) < 2 else (*ids, several)
