"""Marks in a text: token ids, or sequences of ids, that begin or end a part of it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

Marks = tuple[tuple[int, ...], ...]
"""Marks, each a sequence of one or more token ids."""


def read_marks(given: Any, name: str) -> Marks:
    """Converts an argument for marks (token sequences that delimit parts of a text) to a tuple of tuples of ids. A
    single id is a mark of one token.

    >>> read_marks((3, (1, 2)), "ends")
    ((3,), (1, 2))

    Args:
        given: an id, or a tuple of ids and of tuples of ids.
        name: name of the argument, for the error.

    Raises:
        ValueError: `given` is something else.
    """
    several = given if isinstance(given, tuple) else (given,)
    found = tuple(one if isinstance(one, tuple) else (one,) for one in several)
    if not all(one and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in one) for one in found):
        raise ValueError(f"{name}: got {given!r}, takes token ids, or tuples of them for sequences")
    return found


def marked(tokens: Array, marks: Marks) -> Array:
    """Returns the length of the longest mark that ends at each token of `tokens` (`i32[B, N]`), `i32[B, N]`; 0: no mark
    ends.

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
    """Returns the token sequences ("marks") that may stand for the text `within`: each single token of the tokenizer of
    `lm` whose bytes contain it, and its encoding if that has several tokens."""
    ids = [(i,) for i, piece in enumerate(lm.tokenizer.token_bytes()) if within in piece]
    several = tuple(lm.tokenizer.encode(within.decode(), add_special_tokens=False))
    return tuple(ids) if len(several) < 2 else (*ids, several)
