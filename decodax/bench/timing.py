"""Timing of alternatives in turn, so that a change of the machine's speed reaches all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

Times = dict[str, list[float]]


def seconds(call: Callable[[], Any]) -> Callable[[], float]:
    """Returns a function that runs `call`, whose result must be ready when it returns, and gives the seconds."""
    def timed() -> float:
        clock = time.perf_counter()
        call()
        return time.perf_counter() - clock

    return timed


def in_turn(sides: Mapping[str, Callable[[], float]], repeats: int, what: str = "timing") -> Times:
    """Runs every side once without counting (it compiles), then all in turn, `repeats` times, with a progress bar.

    Args:
        sides: functions that return the figure to collect, such as milliseconds.
    """
    times: Times = {name: [] for name in sides}
    for repeat in track(range(repeats + 1), what, console=Console(stderr=True), transient=True):
        for name, side in sides.items():
            figure = side()
            if repeat:
                times[name].append(figure)
    return times


def median(values: Any) -> float:
    """Returns the median."""
    return float(np.median(values))


def ratio(times: Times, of: str, to: str) -> float:
    """Returns the median of `of / to`, pair by pair: neighbouring runs saw the same machine.

    >>> ratio({"a": [2.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}, "a", "b")
    2.0
    """
    return median(np.array(times[of]) / np.array(times[to]))
