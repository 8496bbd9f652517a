"""Reads and checks the arguments of users: numbers for all rows or one for each row, ragged lists, and errors that say
what is wrong.

The code runs on the host in NumPy and is never traced. Lists are padded to a few lengths, so that a list that is
slightly longer than the last one does not cause a compilation.

Rows may be samples: `samples` adjacent rows for each prompt. A list then has an entry for each prompt or for each row.
In all functions, `name` is the argument's name and `takes` describes its valid values, for errors; `batch` is the
number of rows.
"""

from __future__ import annotations

import difflib
import itertools
import numbers
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MOST = 2 ** 31 - 1
"""The largest token id and length; both are i32 on the device."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 8


def shown(value: Any) -> str:
    """Formats a value for an error message; long lists and texts are cut.

    >>> shown(list(range(100)))
    '[0, 1, 2, 3, 4, 5, 6, 7, ...]'
    """
    said = _short.repr(value)
    return " ".join(said.split()) if "\n" in said else said      # arrays have several lines


def outside() -> int:
    """Returns the stack level, for `warnings.warn` in the calling function, of the user's code that called the library.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "decodax":
        frame, level = frame.f_back, level + 1
    return level


def bucket(count: int) -> int:
    """Returns the padded length of a list of `count` entries: a power of two, at least 4.

    >>> [bucket(n) for n in (0, 3, 4, 5, 9)]
    [4, 4, 4, 8, 16]
    """
    return max(4, 1 << max(count - 1, 0).bit_length())


def wrong(name: str, got: Any, takes: str) -> ValueError:
    """Returns the ValueError "name: got ..., takes ...". `name` is that of the argument, `got` the wrong value, and
    `takes` describes the values that are allowed."""
    return ValueError(f"{name}: got {shown(got)}, takes {takes}")


def check_counts(owner: Any, *names: str) -> None:
    """Raises ValueError if one of the attributes `names` of `owner` is below 1; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}, takes 1 or more")


def unknown_argument(name: str, where: str, known: Iterable[str]) -> TypeError:
    """Returns the TypeError for an argument that the function `where` does not take: lists similar names, then all
    names in `known`."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    return TypeError(f"{name}: unknown argument;{meant} {where} takes {', '.join(names)}")


def host(name: str, value: Any, takes: str) -> np.ndarray:
    """Converts an array of any library, or nested lists, to a NumPy array. `name` and `takes` are for the error, as in
    `wrong`.

    Raises:
        ValueError: this is impossible: a ragged list, an array that is being traced, or an array on another device.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise wrong(name, value, f"{takes}; no masked array")
    if hasattr(value, "detach"):        # torch: off the device, and out of the graph
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except Exception:       # each library has errors of its own
        raise wrong(name, value, takes) from None


def scalar(name: str, value: Any, takes: str) -> Any:
    """Converts a NumPy or JAX scalar to a Python number; returns other values unchanged. `name` and `takes` are for the
    error, as in `wrong`."""
    return host(name, value, takes).item() if getattr(value, "ndim", None) == 0 else value


def text(name: str, value: Any) -> str:
    """Checks that a value is a text that is not empty and that UTF-8 can encode, and returns it.

    Raises:
        TypeError: it is not a text.
        ValueError: it is empty, or contains half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {shown(value)}, takes a text")
    if not value:
        raise wrong(name, value, "a text that is not empty")
    return unicode(name, value)


def unicode(name: str, value: str) -> str:
    """Checks that UTF-8 can encode a text, and returns it.

    Raises:
        ValueError: it contains half of a surrogate pair, which is not a character.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: got {shown(value)} with {value[error.start]!r} at place {error.start}, half of a "
                         "surrogate pair; takes Unicode text") from None
    return value


def is_whole(value: Any) -> bool:
    """True if the type of `value` is that of whole numbers: False for 3.0 and for True."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_id(value: Any) -> bool:
    """True if `value` is a whole number that can be a token id."""
    return is_whole(value) and 0 <= int(value) <= MOST


def whole(name: str, value: Any, low: int = 0, high: int = MOST) -> int:
    """Checks that a value is a whole number from `low` to `high`, and returns it as an int.

    Raises:
        ValueError: it is not; 3.0 and True are not whole numbers.
    """
    found = scalar(name, value, "a whole number")
    if not is_whole(found) or not low <= found <= high:
        most = "on" if high == MOST else f"to {high}" if high < 10 ** 9 else f"to 2**{high.bit_length()} - 1"
        raise wrong(name, found, f"a whole number from {low} {most}")
    return int(found)


def whole_rows(name: str, value: Any, count: int, low: int = 0, high: int = MOST, default: int = 0,
               of: str = "prompts") -> list[int]:
    """Returns a whole number for each of `count` prompts, from one number for all or a list with one for each. None
    gives `default`.

    Raises:
        ValueError: another kind of value, or a list of another length.
    """
    if value is None or is_whole(value) or getattr(value, "ndim", None) == 0:
        return [default if value is None else whole(name, value, low, high)] * count
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or not isinstance(value, Iterable):
        whole(name, value, low, high)      # raises
    given = host(name, value, "whole numbers").tolist() if hasattr(value, "ndim") else value
    values = list(itertools.islice(given, count + 1))       # an iterator may have no end
    if len(values) != count:
        raise ValueError(f"{name}: got {len(values)} values for {count} {of}, takes one, or one for each")
    return [default if v is None else whole(f"{name}[{i}]", v, low, high) for i, v in enumerate(values)]


def number(name: str, value: Any, low: float = -np.inf, takes: str = "a number") -> float:
    """Checks that a value is a finite number above `low`, a scalar of any library, and returns it as a float.

    Raises:
        ValueError: it is not; True is not a number.
    """
    found = scalar(name, value, takes)
    if not isinstance(found, numbers.Real) or isinstance(found, bool):
        raise wrong(name, value, takes)
    try:
        number = float(found)
    except OverflowError:
        raise wrong(name, value, takes) from None
    if not low < number < np.inf:
        raise wrong(name, value, takes)
    return number


def positive(name: str, value: Any) -> float:
    """Checks that a value is a finite number above 0, and returns it as a float.

    Raises:
        ValueError: it is not.
    """
    return number(name, value, 0, "a number above 0")


def flag(name: str, value: Any) -> bool:
    """Checks that a value is True or False, and returns it.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(found := scalar(name, value, "True or False"), bool):
        raise wrong(name, value, "True or False")
    return found


def spread(values: Sequence[Any], batch: int, samples: int = 1) -> list[Any] | None:
    """Returns an entry for each of `batch` rows, from one for each row or one for each prompt; None if `values` has
    another length."""
    if len(values) == batch:
        return list(values)
    if len(values) * samples == batch:
        return [v for v in values for _ in range(samples)]
    return None


def _each(batch: int, samples: int) -> str:
    if samples == 1:
        return f"each of the {batch} rows"
    return f"each of the {batch // samples} prompts, or each of their {batch} samples"


def per_row(name: str, value: Any, batch: int, dtype: Any, neutral: Any, takes: str,
            valid: Callable[[np.ndarray], np.ndarray], samples: int = 1) -> np.ndarray:
    """Returns a number for each row, `dtype[batch]`, from one number for all rows or a list with one for each row or
    prompt.

    Args:
        name, takes: name of the argument and description of valid numbers, for the error.
        value: the number, list or array.
        batch, samples: number of rows, and of rows of a prompt.
        neutral: the number that replaces None in a list.
        valid: returns True for each valid number of an array.

    Raises:
        ValueError: another kind of value, a list of another length, or a number that is not valid or that `dtype`
            cannot represent.
    """
    takes = f"{takes}, or one for {_each(batch, samples)}"
    absent = np.array([v is None for v in value]) if isinstance(value, (list, tuple)) else np.array(False)
    filled = [neutral if v is None else v for v in value] if isinstance(value, (list, tuple)) else value
    if np.issubdtype(dtype, np.integer):        # beyond i64 is as good as its end
        cut = lambda v: max(min(v, 2 ** 62), -2 ** 62) if type(v) is int else v
        filled = [cut(v) for v in filled] if isinstance(filled, (list, tuple)) else cut(filled)
    array = host(name, filled, takes)
    mixed = isinstance(filled, list) and any(isinstance(v, bool) for v in filled)
    if array.dtype.kind not in ("biuf" if dtype is np.bool_ else "iuf") or (mixed and dtype is not np.bool_):
        raise wrong(name, value, takes)
    entries = None if array.ndim != 1 else spread(range(len(array)), batch, samples)
    if array.ndim > 1 or (array.ndim == 1 and entries is None):
        raise wrong(name, value, takes)
    good = np.isfinite(array) & valid(array)
    if np.issubdtype(dtype, np.integer) and array.dtype.kind == "f":
        good &= array == np.round(array)
    if dtype is np.float32:
        with np.errstate(over="ignore"):
            good &= np.isfinite(array.astype(np.float32))
    if not (absent | good).all():
        raise wrong(name, value, takes)
    if np.issubdtype(dtype, np.integer):
        array = np.array([max(min(int(v), 2 ** 62), -2 ** 62) for v in array.reshape(-1)]).reshape(array.shape)
    array = array.astype(dtype)
    return np.broadcast_to(array, (batch,)) if entries is None else array[entries]


def _checked(name: str, value: Any, ids: Sequence[int], vocab_size: int | None) -> None:
    for token in ids:
        if not is_id(token):
            raise wrong(name, value, "token ids, whole numbers from 0 on")
        if vocab_size is not None and token >= vocab_size:
            raise ValueError(f"{name}: got token {token}, takes ids below the vocabulary's size, {vocab_size}")


def plain(name: str, value: Any, takes: str) -> Any:
    """Converts arrays, tuples, sets and ranges to nested lists; returns other values unchanged. `name` and `takes` are
    for the error, as in `wrong`.

    Raises:
        ValueError: a list contains itself, or a range is too long for memory.
    """
    def lists(value: Any) -> Any:
        if hasattr(value, "tolist") and not isinstance(value, np.ma.MaskedArray):
            value = value.tolist()
        if isinstance(value, range) and len(value) > 1 << 24:
            raise wrong(name, value, takes)
        return [lists(v) for v in value] if isinstance(value, (list, tuple, set, frozenset, range)) else value

    try:
        return lists(value)
    except RecursionError:
        raise wrong(name, value, takes) from None


def id_rows(name: str, value: Any, batch: int, vocab_size: int | None = None, samples: int = 1) -> np.ndarray:
    """Returns token ids for each row, `i32[batch, E]`, padded with -1, from an id or a list for all rows, or a list of
    such lists for each row or prompt (None: no ids).

    Raises:
        ValueError: an entry is not a token id, or the number of lists is wrong.
    """
    takes = f"token ids, or a list of them for {_each(batch, samples)}"
    rows = plain(name, value, takes)
    rows = [rows] if not isinstance(rows, list) else rows
    each = any(isinstance(r, list) or r is None for r in rows)
    if each:
        if not all(r is None or isinstance(r, list) for r in rows):
            raise wrong(name, value, takes)
        rows = [[t for t in (r or []) if t != -1] for r in rows]
    else:
        rows = [rows]
    for row in rows:
        _checked(name, value, row, vocab_size)
    out = np.full((len(rows), bucket(max(map(len, rows), default=0))), -1, np.int32)
    for i, row in enumerate(rows):
        out[i, :len(row)] = row
    if not each:
        return np.broadcast_to(out, (batch, out.shape[1]))
    entries = spread(range(len(rows)), batch, samples)
    if entries is None:
        raise wrong(name, value, takes)
    return out[entries]


def sequence_rows(name: str, value: Any, batch: int, vocab_size: int | None = None, *, front: bool = True,
                  samples: int = 1) -> np.ndarray:
    """Returns token sequences for each row, `i32[batch, S, L]`, padded with -1 at the front or at the end, from a list
    of sequences for all rows, or a list of such lists for each row or prompt.

    Raises:
        ValueError: another kind of value, an empty sequence, or an entry that is not a token id.
    """
    takes = f"a list of token sequences, or such a list for {_each(batch, samples)}"
    lists = plain(name, value, takes)
    if not isinstance(lists, list) or not all(isinstance(s, list) or s is None for s in lists):
        raise wrong(name, value, takes)
    each = any(s is None or any(isinstance(t, list) for t in s) for s in lists)
    lists = [s or [] for s in lists] if each else [lists]
    for rows in lists:
        if not all(isinstance(s, list) and s for s in rows):
            raise wrong(name, value, takes + "; no sequence is empty")
        for s in rows:
            _checked(name, value, s, vocab_size)
    longest = bucket(max((len(s) for rows in lists for s in rows), default=0))
    out = np.full((len(lists), bucket(max(map(len, lists), default=0)), longest), -1, np.int32)
    for i, rows in enumerate(lists):
        for j, s in enumerate(rows):
            out[i, j, slice(longest - len(s), None) if front else slice(len(s))] = s
    if not each:
        return np.broadcast_to(out, (batch, *out.shape[1:]))
    entries = spread(range(len(lists)), batch, samples)
    if entries is None:
        raise wrong(name, value, takes)
    return out[entries]


def bias_rows(name: str, value: Any, batch: int, samples: int = 1) -> list[list[tuple[list[int], float]]]:
    """Returns for each row a list of pairs: a token sequence and its bias.

    Takes `{id: bias}`, `{(id, ...): bias}` or `[[[id, ...], bias], ...]` for all rows, or a list of such dictionaries
    for each row or prompt.

    Raises:
        ValueError: another kind of value.
    """
    takes = (f"a dictionary from a token or a tuple of tokens to a bias, a list of [[tokens], bias], or a dictionary "
             f"for {_each(batch, samples)}")

    def pairs(entry: Any) -> list[tuple[list[int], float]]:
        items = list(entry.items()) if isinstance(entry, Mapping) else list(map(tuple, plain(name, entry, takes)))
        found = []
        for tokens, bias in items:
            bias = scalar(name, bias, takes)
            tokens = plain(name, tokens, takes)
            # JSON has no keys but strings
            tokens = int(tokens) if isinstance(tokens, str) and tokens.isdecimal() else tokens
            sequence = tokens if isinstance(tokens, list) else [tokens]
            if not sequence or not isinstance(bias, numbers.Real) or isinstance(bias, bool) or not bias < np.inf:
                raise wrong(name, value, takes)
            _checked(name, value, sequence, None)
            found.append((sequence, float(bias)))
        return found

    each = isinstance(value, (list, tuple)) and any(isinstance(v, Mapping) for v in value)
    try:
        found = [pairs(v) for v in value] if each else [pairs(value)] * batch
    except (TypeError, AttributeError):
        raise wrong(name, value, takes) from None
    except ValueError as error:
        raise error if str(error).startswith(name) else wrong(name, value, takes) from None
    rows = spread(found, batch, samples)
    if rows is None:
        raise wrong(name, value, takes)
    return rows
