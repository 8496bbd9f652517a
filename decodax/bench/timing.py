"""Times alternatives in turn, so that a change of the machine's speed affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

Times = dict[str, list[float]]


def seconds(call: Callable[[], Any]) -> Callable[[], float]:
    """Returns a function that runs `call` and returns the seconds it took. The result must be ready when `call`
    returns."""
    def timed() -> float:
        clock = time.perf_counter()
        call()
        return time.perf_counter() - clock

    return timed


def in_turn(sides: Mapping[str, Callable[[], float]], repeats: int, what: str = "timing") -> Times:
    """Runs every alternative once to compile it, then all of them in turn, `repeats` times, with a progress bar.

    Args:
        sides: the alternatives by name: functions that return the figure to collect, such as milliseconds.
        repeats: the number of counted runs of each.
        what: label of the progress bar.

    Returns:
        The `repeats` figures of each alternative.
    """
    times: Times = {name: [] for name in sides}
    for repeat in track(range(repeats + 1), what, console=Console(stderr=True), transient=True):
        for name, side in sides.items():
            figure = side()
            if repeat:
                times[name].append(figure)
    return times


def median(values: Any) -> float:
    """Returns the median as a float."""
    return float(np.median(values))


def ratio(times: Times, of: str, to: str) -> float:
    """Returns the median of the ratios of `times[of]` to `times[to]`, pairing runs that followed each other, so that
    both had the same load.

    >>> ratio({"a": [2.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}, "a", "b")
    2.0
    """
    return median(np.array(times[of]) / np.array(times[to]))
