"""Parameters of laws: those that run by default, and the rest marked `full`, which `scripts/test.sh --all` runs."""

import itertools
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import pytest


def often(default: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases in their order; those that are not in `default` are marked `full`. A tuple is one case."""
    cases = list(cases)
    unknown = [case for case in default if case not in cases]
    if unknown:
        raise ValueError(f"default: got {unknown}, takes cases of {cases}")
    return [case if case in default else _rest(case) for case in cases]


def pairs(*axes: Iterable[Hashable]) -> list[Any]:
    """The product of axes; by default only as many of its cases as show each pair of values of two axes.

    The cases are found greedily: the next one has the most pairs that are not shown yet, and of equals the first. The
    rest is marked `full`. Three axes of 3, 4 and 2 values take 12 cases of 24.
    """
    cases = list(itertools.product(*axes))
    shows = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    chosen: set[Any] = set()
    wanted: set[Any] = set().union(*shows.values())
    while wanted:
        best = max(cases, key=lambda case: len(shows[case] & wanted))
        chosen.add(best)
        wanted -= shows[best]
    return often(chosen, cases)


def _rest(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
