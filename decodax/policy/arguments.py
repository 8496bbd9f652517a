"""Reading what a user passes: numbers for all rows or one for each, ragged lists, and errors that say what is wrong.

Host code in NumPy; nothing here is traced. Lists are padded to a few lengths, so that one a little longer than the
last does not compile anew.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def bucket(count: int) -> int:
    """The padded length for a list of `count` entries: a power of two, at least 4.

    >>> [bucket(n) for n in (0, 3, 4, 5, 9)]
    [4, 4, 4, 8, 16]
    """
    return max(4, 1 << max(count - 1, 0).bit_length())


def wrong(name: str, got: Any, takes: str) -> ValueError:
    """The error for an argument of the wrong value."""
    return ValueError(f"{name}: got {got!r}, takes {takes}")


def per_row(name: str, value: Any, batch: int, dtype: Any, neutral: Any, takes: str,
            valid: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """A number, or one for each row: `dtype[batch]`. None in a list means `neutral`.

    Args:
        takes: what a valid number is, for the error.
        valid: checks them all.

    Raises:
        ValueError: not a number or `batch` of them, or a number that is not valid.
    """
    takes = f"{takes}, or one for each of the {batch} rows"
    absent = np.array([v is None for v in value]) if isinstance(value, (list, tuple)) else np.array(False)
    filled = [neutral if v is None else v for v in value] if isinstance(value, (list, tuple)) else value
    try:
        array = np.asarray(filled)
    except ValueError:      # a ragged list
        raise wrong(name, value, takes) from None
    if array.dtype.kind not in "biuf" or array.ndim > 1 or (array.ndim == 1 and array.shape[0] != batch):
        raise wrong(name, value, takes)
    array = array.astype(np.float64)
    whole = not np.issubdtype(dtype, np.integer) or (array == np.round(array))
    if not (absent | (np.isfinite(array) & whole & valid(array))).all():
        raise wrong(name, value, takes)
    return np.array(np.broadcast_to(array, (batch,)), dtype)


def is_neutral(value: Any, neutral: Any) -> bool:
    """Whether an argument asks for nothing: None, an empty list, or one number that changes nothing.

    A number for each row always asks for something, so that other numbers do not compile anew.
    """
    if isinstance(value, (list, tuple, Mapping)):
        return not value
    return value is None or (np.ndim(value) == 0 and bool(value == neutral))


def is_id(value: Any) -> bool:
    """Whether `value` is a whole number that is not negative."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def _checked(name: str, value: Any, ids: Sequence[int], vocab_size: int | None) -> None:
    for token in ids:
        if not is_id(token):
            raise wrong(name, value, "token ids, whole numbers from 0 on")
        if vocab_size is not None and token >= vocab_size:
            raise ValueError(f"{name}: got token {token}, takes ids below the vocabulary's size, {vocab_size}")


def _plain(value: Any) -> Any:
    """Arrays, tuples, sets and ranges as nested lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (list, tuple, set, frozenset, range)) else value


def id_rows(name: str, value: Any, batch: int, vocab_size: int | None = None) -> np.ndarray:
    """Token ids for all rows (an id or a list) or a list for each (None: none): `i32[batch, E]`, padded with -1.

    Raises:
        ValueError: something is not a token id, or there is not one list for each row.
    """
    rows = _plain(value)
    rows = [rows] if not isinstance(rows, list) else rows
    if any(isinstance(r, list) or r is None for r in rows):
        if len(rows) != batch or not all(r is None or isinstance(r, list) for r in rows):
            raise wrong(name, value, f"token ids, or a list of them for each of the {batch} rows")
        rows = [[t for t in (r or []) if t != -1] for r in rows]
    else:
        rows = [rows] * batch
    for row in rows:
        _checked(name, value, row, vocab_size)
    out = np.full((batch, bucket(max(map(len, rows), default=0))), -1, np.int32)
    for i, row in enumerate(rows):
        out[i, :len(row)] = row
    return out


def sequence_rows(name: str, value: Any, batch: int, vocab_size: int | None = None, *, front: bool = True
                  ) -> np.ndarray:
    """Token sequences for all rows, or a list of them for each: `i32[batch, S, L]`, padded with -1, `front` or back.

    Raises:
        ValueError: not a list of sequences, an empty sequence, or something that is not a token id.
    """
    takes = f"a list of token sequences, or such a list for each of the {batch} rows"
    lists = _plain(value)
    if not isinstance(lists, list) or not all(isinstance(s, list) or s is None for s in lists):
        raise wrong(name, value, takes)
    if any(s is None or any(isinstance(t, list) for t in s) for s in lists):
        if len(lists) != batch:
            raise wrong(name, value, takes)
        lists = [s or [] for s in lists]
    else:
        lists = [lists] * batch
    for rows in lists:
        if not all(isinstance(s, list) and s for s in rows):
            raise wrong(name, value, takes + "; no sequence is empty")
        for s in rows:
            _checked(name, value, s, vocab_size)
    longest = bucket(max((len(s) for rows in lists for s in rows), default=0))
    out = np.full((batch, bucket(max(map(len, lists), default=0)), longest), -1, np.int32)
    for i, rows in enumerate(lists):
        for j, s in enumerate(rows):
            out[i, j, slice(longest - len(s), None) if front else slice(len(s))] = s
    return out


def bias_rows(name: str, value: Any, batch: int) -> list[list[tuple[list[int], float]]]:
    """Biases by token or sequence, for all rows or for each: pairs of a sequence and its bias, a list for each row.

    Takes `{id: bias}`, `{(id, ...): bias}`, `[[[id, ...], bias], ...]`, or a list of such dictionaries, one a row.

    Raises:
        ValueError: none of these.
    """
    takes = (f"a dictionary from a token or a tuple of tokens to a bias, a list of [[tokens], bias], or a dictionary "
             f"for each of the {batch} rows")

    def pairs(entry: Any) -> list[tuple[list[int], float]]:
        items = list(entry.items()) if isinstance(entry, Mapping) else [tuple(pair) for pair in entry or ()]
        found = []
        for tokens, bias in items:
            tokens = _plain(tokens)
            # JSON has no keys but strings
            tokens = int(tokens) if isinstance(tokens, str) and tokens.isdecimal() else tokens
            sequence = tokens if isinstance(tokens, list) else [tokens]
            if not sequence or not isinstance(bias, numbers.Real) or not float(bias) < np.inf:
                raise wrong(name, value, takes)
            _checked(name, value, sequence, None)
            found.append((sequence, float(bias)))
        return found

    each = isinstance(value, (list, tuple)) and any(isinstance(v, Mapping) for v in value)
    try:
        rows = [pairs(v) for v in value] if each else [pairs(value)] * batch
    except (TypeError, AttributeError):
        raise wrong(name, value, takes) from None
    except ValueError as error:
        raise error if str(error).startswith(name) else wrong(name, value, takes) from None
    if len(rows) != batch:
        raise wrong(name, value, takes)
    return rows
