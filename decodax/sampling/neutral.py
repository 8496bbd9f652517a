"""Neutral values: values of arguments of `generate` that have no effect.

None is neutral for every argument. Neutral values are always accepted, whatever other arguments are given.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from decodax.common.table import ARGUMENTS

NEUTRAL = {name: own.neutral for name, own in ARGUMENTS.items() if own.neutral is not None}
"""Neutral values by argument, besides None. For arguments not listed, None and empty lists are neutral."""


def is_neutral(name: str, value: Any) -> bool:
    """True if an argument has no effect: None, a number that changes nothing, or an empty list if no number is neutral.

    A list with a number for each row is never neutral, so that other numbers do not recompile (see `asks_nothing`).

    >>> is_neutral("top_p", 1), is_neutral("top_p", True), is_neutral("top_p", [1.0]), is_neutral("bad_words_ids", [])
    (True, False, False, True)
    """
    if value is None:
        return True
    if not (known := NEUTRAL.get(name)):
        return isinstance(value, (list, tuple, set, frozenset, Mapping)) and not value
    if isinstance(value, (bool, np.bool_)):
        return any(isinstance(x, bool) and x == value for x in known)
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) != 0:
        return False
    try:
        return any(not isinstance(x, bool) and bool(value == x) for x in known)
    except Exception:       # an array of something that is not a number, or one that is being traced
        return False


def is_zero(value: Any) -> bool:
    """Returns True if `value`, a number, a bool or a list or array of these (one for each row), is 0 or False
    everywhere."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    return all(map(is_zero, rows)) if isinstance(rows, (list, tuple)) and rows else \
        isinstance(rows, numbers.Real) and not rows


def asks_nothing(name: str, value: Any, vocab_size: int | None = None) -> bool:
    """Returns True if `is_neutral` does, and also for a list of neutral entries and for a `top_k` of at least
    `vocab_size`.

    >>> asks_nothing("top_p", [1.0, None]), asks_nothing("top_k", 500, vocab_size=375)
    (True, True)
    """
    rows = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if isinstance(rows, (list, tuple)) and rows:
        return all(asks_nothing(name, x, vocab_size) for x in rows)
    whole = name == "top_k" and vocab_size is not None and isinstance(value, numbers.Real)
    return is_neutral(name, value) or (whole and value >= vocab_size)
