"""Reads token ids from the files of models."""

from __future__ import annotations

from typing import Any


def named(value: Any) -> Any:
    """Returns a token id, or a list of them, without negative numbers, which stand for "no token" in files.

    >>> named(5), named(-1), named([2, -1]), named([-1])
    (5, None, [2], None)
    """
    if isinstance(value, (list, tuple)):
        return [each for each in value if named(each) is not None] or (None if value else value)
    return None if isinstance(value, int) and value < 0 else value
