"""Accuracy against parallelism: decoding systems on problems with checkable answers.

    python scripts/evaluate.py "llada:steps=[16,8,4,2,1]" --task copy shuffle sudoku --plot curves.png

With `--caches` it measures what cache policies lose on long texts instead: see `scripts/evaluate_caches.py`, or
`--caches --help`.

A system is NAME[:OPTION=VALUE,...] of `decodax list`; a list of values is a grid, and its points make one curve. For
each point and task: the share of right answers, the share of outputs that are token for token those of the first point,
new tokens a forward (of a row, its end token included), forwards a row, tokens a second of the decode loop (median of
the repeats, without compiling); and for each curve the accuracy under parallelism (AUP) of d3LLM (Qian et al. 2025),
see `aup`. The figures of the problems are counts and repeat exactly; tokens a second are this machine's.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import itertools
import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("system", "task", "right", "same", "tokens/forward", "forwards", "tokens/s")
ALPHA, SLACK = 3.0, 0.05
"""Of `aup`: the penalty, and how far a point may fall below the curve's first."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A system with fixed options: the curve it belongs to, its own name, and what builds its algorithm."""

    curve: str
    name: str
    build: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A point on a task.

    Attributes:
        curve, system, task: what was run. problems: how many.
        accuracy: share of right answers, 0 to 1. same: share of outputs whose tokens are the first point's; NaN if that
            failed.
        tokens_per_forward: new tokens over forwards in which their row was running, pooled over rows.
        forwards: of the decode loop, the mean over rows.
        tokens_per_second: of the decode loop of whole batches. seconds: of it.
        error: why it failed, if it did.
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
        """The row in words, one entry for each of `COLUMNS`."""
        if self.error is not None:
            return self.system, self.task, "failed", "", "", "", ""
        return (self.system, self.task, f"{self.accuracy:.1%}", "" if math.isnan(self.same) else f"{self.same:.1%}",
                f"{self.tokens_per_forward:.2f}", f"{self.forwards:.1f}", f"{self.tokens_per_second:,.0f}")


def points(given: Sequence[str], lm: Any, draft: Any = None) -> list[Point]:
    """What the command line asks for.

    Raises:
        ValueError: an unknown system or option, or a text of another form.
    """
    from decodax.common.registry import ALGORITHMS

    out = []
    for text in given:
        name, _, rest = text.partition(":")
        try:
            call: Any = ast.parse(f"dict({rest})", mode="eval").body
            options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            if call.args or None in options:
                raise ValueError("a value without a name")
        except (SyntaxError, ValueError, AttributeError) as error:
            raise ValueError(f"{text}: takes NAME:OPTION=VALUE,... or lists of values") from error
        grid = {k: v if isinstance(v, list) else [v] for k, v in options.items()}
        for values in itertools.product(*grid.values()):
            own = dict(zip(grid, values, strict=True))
            shown = name + (":" if own else "") + ",".join(f"{k}={v!r}" for k, v in own.items())
            needs_draft = name in ALGORITHMS and ALGORITHMS[name].takes_draft
            build = lambda name=name, own=own, d=needs_draft: ALGORITHMS.make(name, lm, draft if d else None, **own)
            build()                                              # an error should come before the first run
            out.append(Point(text, shown, build))
    return out


def run(lm: Any, grid: Sequence[Point], tasks: Sequence[str], *, problems: int = 100, batch: int = 50, seed: int = 0,
        repeats: int = 3, report: Callable[[int, int, str], None] | None = None, **sampling: Any) -> list[Row]:
    """Runs each point on each task. A point that fails has the error in its row, and the others go on.

    Args:
        lm: what `dx.load` gave, with the vocabulary of `problems.py`.
        problems: held-out problems of a task, the same for all points. batch: taken at a time.
        repeats: timed runs of each point and task, after one that compiles.
        report: told before each run: runs done, runs in all, what runs now.
        sampling: of `dx.generate`; greedy without any.

    Raises:
        ValueError: fewer repeats than 1.
    """
    import problems as source

    import decodax as dx

    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, takes at least 1")
    rows: list[Row] = []
    first: dict[str, list[list[int]]] = {}                           # of the first point, by task
    for (i, point), task in itertools.product(enumerate(grid), tasks):
        if report is not None:
            report(len(rows), len(grid) * len(tasks), f"{point.name} {task}")
        asked = source.problems(task, problems, seed)
        row = Row(point.curve, point.name, task, len(asked))
        try:
            answer = functools.partial(
                dx.generate, lm, [p.prompt for p in asked], max_new_tokens=source.CANVAS, algorithm=point.build(),
                batch_size=min(batch, len(asked)), seed=seed, **sampling)
            out = answer()
            timed = [answer().stats for _ in range(repeats)]
        except (ValueError, RuntimeError, NotImplementedError) as error:
            rows.append(dataclasses.replace(row, error=f"{type(error).__name__}: {error}"))
            continue
        assert out.text is not None
        right = [p.correct(text) for p, text in zip(asked, out.text, strict=True)]
        tokens = [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
        if i == 0:
            first[task] = tokens
        same = [a == b for a, b in zip(tokens, first[task], strict=True)] if task in first else [math.nan]
        rows.append(dataclasses.replace(
            row, accuracy=sum(right) / len(right), same=sum(same) / len(same),
            tokens_per_forward=out.stats.tokens_per_forward, forwards=float(out.stats.rounds.mean()),
            tokens_per_second=statistics.median(s.tokens_per_second for s in timed),
            seconds=statistics.median(s.seconds for s in timed)))
    return rows


def aup(curve: Sequence[tuple[float, float]], best: float, alpha: float = ALPHA, slack: float = SLACK) -> float:
    """Accuracy under parallelism (d3LLM, Qian et al. 2025): the area under a curve, weighted.

    With points `(r_i, y_i)` of tokens a forward and accuracy in percent, by rising `r`, of which those below
    `y_1 - 100 slack` are left out: `r_1 y_1 + sum_i (r_i - r_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2` with
    `W(y) = min(exp(-alpha (1 - y / y_max)), 1)`. What is gained in speed counts less the more accuracy it costs.

    Args:
        curve: pairs of tokens a forward and accuracy (0 to 1).
        best: the highest accuracy that any system reached on the task (0 to 1).

    >>> round(aup([(1.0, 0.9), (2.0, 0.9), (4.0, 0.5)], best=0.9), 6)
    180.0
    """
    pairs = sorted(curve)
    if not pairs or best <= 0:
        return 0.0
    kept = [(r, 100 * y) for r, y in pairs if y >= pairs[0][1] - slack]
    worth = lambda y: y * min(math.exp(-alpha * (1 - y / (100 * best))), 1.0)
    area = kept[0][0] * kept[0][1]
    for (r0, y0), (r1, y1) in itertools.pairwise(kept):
        area += (r1 - r0) * (worth(y0) + worth(y1)) / 2
    return area


def curves(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """The rows that did not fail, by task and curve, in the order of tokens a forward."""
    out: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row.error is None:
            out.setdefault(row.task, {}).setdefault(row.curve, []).append(row)
    return {task: {curve: sorted(found, key=lambda r: r.tokens_per_forward) for curve, found in each.items()}
            for task, each in out.items()}


def scores(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The AUP of each curve on each task."""
    out: dict[str, dict[str, float]] = {}
    for task, each in curves(rows).items():
        best = max(row.accuracy for found in each.values() for row in found)
        for curve, found in each.items():
            out.setdefault(curve, {})[task] = aup([(r.tokens_per_forward, r.accuracy) for r in found], best)
    return out


def plot(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Draws accuracy against tokens a forward, a panel a task, a line a curve."""
    from matplotlib.figure import Figure

    found = curves(rows)
    wide = min(len(found), 3) or 1
    tall = -(-len(found) // wide) or 1
    figure = Figure(figsize=(3.6 * wide, 2.9 * tall + 0.9), layout="constrained")
    panels: list[Any] = list(figure.subplots(tall, wide, squeeze=False, sharey=True).flat)
    names = list(dict.fromkeys(row.curve for row in rows))
    score = scores(rows)
    for panel in panels[len(found):]:
        panel.set_axis_off()
    for panel, (task, each) in zip(panels, found.items(), strict=False):
        for curve, at in each.items():
            panel.plot([r.tokens_per_forward for r in at], [100 * r.accuracy for r in at], marker="o", markersize=4,
                       color=f"C{names.index(curve) % 10}", linestyle="-" if len(at) > 1 else "",
                       label=f"AUP {score[curve][task]:.0f}")
        panel.set(title=task, xlabel="tokens a forward", ylim=(-4, 104))
        panel.set_xlim(left=0)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.legend(fontsize="x-small", frameon=False)
    for panel in panels[::wide]:
        panel.set_ylabel("right, %")
    handles = [panels[0].plot([], [], marker="o", color=f"C{i % 10}")[0] for i in range(len(names))]
    figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 2), frameon=False, fontsize="small")
    figure.supxlabel(title, fontsize="small", color="0.4")
    figure.savefig(path, dpi=150)


def markdown(rows: Sequence[Row], setting: str) -> str:
    """Tables to paste into a page."""
    table = lambda head, body: "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(x) + " |" for x in body)])
    score = scores(rows)
    tasks = list(curves(rows))
    body = [(curve, *(f"{each[t]:.0f}" if t in each else "" for t in tasks), f"{sum(each.values()) / len(each):.0f}")
            for curve, each in score.items()]
    parts = [f"{setting}.", table(COLUMNS, [row.cells() for row in rows]), "Accuracy under parallelism (AUP):",
             table(("system", *tasks, "mean"), body)]
    return "\n\n".join(parts) + "\n"


def show(rows: Sequence[Row], setting: str) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i > 1 else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    under, tasks = Table(box=None, pad_edge=False, title="accuracy under parallelism (AUP)"), list(curves(rows))
    for i, column in enumerate(("system", *tasks, "mean")):
        under.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for curve, each in scores(rows).items():
        under.add_row(curve, *(f"{each[t]:.0f}" if t in each else "" for t in tasks),
                      f"{sum(each.values()) / len(each):.0f}")
    console.print(under)
    console.print(setting)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("systems", nargs="+", metavar="NAME[:OPTION=VALUE,...]", help="systems; a list of values is a grid")
    p.add_argument("-m", "--model", default="tasks-diffusion", metavar="NAME_OR_DIR", help="default: tasks-diffusion")
    p.add_argument("--draft", metavar="NAME_OR_DIR", help="the smaller model, for systems that need one")
    p.add_argument("--task", nargs="+", default=["all"], metavar="TASK", help="tasks, or all (default)")
    p.add_argument("--problems", type=int, default=100, metavar="N", help="of each task (default: 100)")
    p.add_argument("--batch", type=int, default=50, metavar="N", help="problems at a time (default: 50)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of problems and sampling (default: 0)")
    p.add_argument("--repeats", type=int, default=3, metavar="N",
                   help="timed runs of each, of which the median is shown (default: 3)")
    p.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves, as PNG, SVG or PDF")
    p.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    p.add_argument("--markdown", action="store_true", help="print the tables in Markdown, with the command")
    return p


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if "--caches" in words:
        import evaluate_caches

        return evaluate_caches.main([word for word in words if word != "--caches"])
    args = parser().parse_args(argv)
    import jax
    from problems import TASKS
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    import decodax as dx

    tasks = list(TASKS) if "all" in args.task else list(dict.fromkeys(args.task))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        if unknown := [task for task in tasks if task not in TASKS]:
            raise ValueError(f"--task: got {unknown[0]}, takes all, {', '.join(TASKS)}")
        for path in filter(None, (args.plot, args.json)):
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: there is no such directory")
        lm = dx.load(args.model)
        grid = points(args.systems, lm, dx.load(args.draft) if args.draft else None)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=None)
            rows = run(lm, grid, tasks, problems=args.problems, batch=args.batch, seed=args.seed, repeats=args.repeats,
                       temperature=args.temperature,
                       report=lambda done, total, what: progress.update(bar, completed=done, total=total,
                                                                        description=what))
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    setting = (f"{lm.name}, {args.problems} problems a task, batch {args.batch}, seed {args.seed}, temperature "
               f"{args.temperature:g}; {jax.devices()[0].device_kind}, {os.cpu_count()} cores; JAX {jax.__version__}")
    command = shlex.join(["python", "scripts/evaluate.py", *(sys.argv[1:] if argv is None else argv)])
    if args.markdown:
        print(f"    {command}\n\n{markdown(rows, setting)}", end="")
    else:
        show(rows, setting)
    if args.json:
        facts: Mapping[str, Any] = {"command": command, "setting": setting, "aup": scores(rows),
                                    "rows": [dataclasses.asdict(row) for row in rows]}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot, setting)
    for row in rows:
        if row.error:
            print(f"evaluate: {row.system} failed on {row.task}: {row.error}", file=sys.stderr)
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
