"""Draws different problems."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 100_000
"""Number of draws without a new problem after which there are none left, as far as one can tell."""


def distinct(count: int, draw: Callable[[], T | None], key: Callable[[T], Hashable]) -> list[T]:
    """Returns the first `count` different results of `draw`.

    Args:
        count: number of results, at least 1.
        draw: returns the next result; None: it does not count.
        key: returns what makes a result different from another.

    Raises:
        ValueError: `count` is less than 1, or there are fewer different results.
    """
    if count < 1:
        raise ValueError(f"count: got {count}, takes at least 1")
    found, misses = dict[Hashable, T](), 0
    while len(found) < count:
        one = draw()
        if one is None or key(one) in found:
            misses += 1
            if misses == PATIENCE:
                raise ValueError(f"count: got {count}, but there are only {len(found)} such problems")
        else:
            found[key(one)], misses = one, 0
    return list(found.values())
