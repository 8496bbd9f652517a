"""Accuracy against parallelism: decoding systems on problems with checkable answers.

A system is NAME[:OPTION=VALUE,...] of `decodax list`; a list of values is a grid, and its points make one curve. The
figures of the problems are counts and repeat exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from decodax.bench.problems import puzzles as source
from decodax.common.registry import ALGORITHMS
from decodax.front.generate import generate

COLUMNS = ("system", "task", "right", "same", "tokens/forward", "forwards", "tokens/s")


class Point(NamedTuple):
    """One setting to measure: a system with fixed options. It has the text of the grid that it belongs to (its curve in
    a plot), its own name, and a function that builds its algorithm."""

    curve: str
    name: str
    build: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class GridRow:
    """A point on a task, or the message of the error with which it failed.

    `accuracy` is the share of right answers, 0 to 1; `same` that of outputs with the tokens of the first point's, NaN
    if that failed; `tokens_per_forward` are new tokens over forwards in which their row was running, pooled over rows;
    `forwards` are those of the decode loop, the mean over rows; the speed is that of whole batches.
    """

    curve: str
    system: str
    task: str
    problems: int
    accuracy: float = math.nan
    same: float = math.nan
    tokens_per_forward: float = math.nan
    forwards: float = math.nan
    tokens_per_second: float = math.nan
    seconds: float = math.nan
    error: str | None = None

    def cells(self) -> tuple[str, ...]:
        """Returns the row as text, one entry for each of `COLUMNS`."""
        if self.error is not None:
            return self.system, self.task, "failed", "", "", "", ""
        return (self.system, self.task, f"{self.accuracy:.1%}", "" if math.isnan(self.same) else f"{self.same:.1%}",
                f"{self.tokens_per_forward:.2f}", f"{self.forwards:.1f}", f"{self.tokens_per_second:,.0f}")


def points(given: Sequence[str], lm: Any, draft: Any = None) -> list[Point]:
    """Returns the settings to measure for systems written as NAME:OPTION=VALUE,...; an option with a list of values
    stands for one setting for each, several lists for all combinations. `lm` and `draft` are the models."""
    out = []
    for text in given:
        name, options = ALGORITHMS.parse(text)
        grid = {k: v if isinstance(v, list) else [v] for k, v in options.items()}
        for values in itertools.product(*grid.values()):
            own = dict(zip(grid, values, strict=True))
            shown = name + (":" if own else "") + ",".join(f"{k}={v!r}" for k, v in own.items())
            needed = draft if ALGORITHMS.find(name).takes_draft else None
            build = functools.partial(ALGORITHMS.make, name, lm, needed, **own)
            build()                                              # an error should come before the first run
            out.append(Point(text, shown, build))
    return out


def run(lm: Any, grid: Sequence[Point], tasks: Sequence[str], *, problems: int = 100, batch: int = 50, seed: int = 0,
        repeats: int = 3, report: Callable[[int, int, str], None] | None = None, **sampling: Any) -> list[GridRow]:
    """Runs each point on each task; the error of a point that fails is in its row.

    Each runs once to compile and then `repeats` times on the same held-out problems. `report` is called before each
    with the runs done, the runs in all, and the name of this one; `sampling` are keywords of `dx.generate`.
    """
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, takes at least 1")
    rows: list[GridRow] = []
    first: dict[str, list[list[int]]] = {}                           # of the first point, by task
    for (i, point), task in itertools.product(enumerate(grid), tasks):
        if report is not None:
            report(len(rows), len(grid) * len(tasks), f"{point.name} {task}")
        asked = source.problems(task, problems, seed)
        row = GridRow(point.curve, point.name, task, len(asked))
        try:
            answer = functools.partial(
                generate, lm, [p.prompt for p in asked], max_new_tokens=source.CANVAS, algorithm=point.build(),
                batch_size=min(batch, len(asked)), seed=seed, **sampling)
            out = answer()
            timed = [answer().stats for _ in range(repeats)]
        except (ValueError, RuntimeError, NotImplementedError) as error:
            rows.append(dataclasses.replace(row, error=f"{type(error).__name__}: {error}"))
            continue
        assert out.text is not None
        right = [p.correct(text) for p, text in zip(asked, out.text, strict=True)]
        tokens = [out.row(i).tolist() for i in range(len(asked))]
        if i == 0:
            first[task] = tokens
        same = [a == b for a, b in zip(tokens, first[task], strict=True)] if task in first else [math.nan]
        middle = lambda name: statistics.median(getattr(stats, name) for stats in timed)    # noqa: B023
        rows.append(dataclasses.replace(
            row, accuracy=sum(right) / len(right), same=sum(same) / len(same),
            tokens_per_forward=out.stats.tokens_per_forward, forwards=float(out.stats.rounds.mean()),
            tokens_per_second=middle("tokens_per_second"), seconds=middle("seconds")))
    return rows
