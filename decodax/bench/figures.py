"""Output of the programs in scripts/: tables for the terminal or in Markdown, plots of curves, and progress bars."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Points = Sequence[tuple[float, float]]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    >>> print(markdown_table(["name", "ms"], [["a", "1"]]))
    | name | ms |
    |---|---|
    | a | 1 |
    """
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", markdown: bool = False) -> None:
    """Prints a table to standard output, as Markdown with `markdown`; otherwise, if the output is a file or pipe, lines
    are not wrapped."""
    if markdown:
        print(f"{title}:\n\n{markdown_table(columns, rows)}\n" if title else markdown_table(columns, rows), flush=True)
        return
    table = Table(box=None, pad_edge=False, title=title or None)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 1000).print(table)


def plot_lines(path: Path, panels: Mapping[str, Mapping[str, Points]], x: str, y: str | Sequence[str], title: str = "",
               log: bool = False, marker: bool = True) -> None:
    """Draws curves in one panel for each entry of `panels`, with one legend for all.

    Args:
        path: the file to write (PNG, SVG or PDF).
        panels: for each panel title, the points of each curve by its name.
        x: label of the x axis.
        y: label of the y axis; with a sequence of labels, one for each panel, each panel has its own scale.
        title: title of the figure.
        log: whether the x axis is logarithmic.
        marker: whether points have markers.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    wide = min(len(panels), 3) or 1
    tall = -(-len(panels) // wide) or 1
    figure = Figure(figsize=(4.2 * wide, 3.4 * tall + 0.2 * len(names) ** 0.5 + 0.5), layout="constrained")
    axes: list[Any] = list(figure.subplots(tall, wide, squeeze=False, sharey=isinstance(y, str)).flat)
    for i, (panel, (name, curves)) in enumerate(zip(axes, panels.items(), strict=False)):
        for curve, points in curves.items():
            at = names.index(curve)
            panel.plot([a for a, _ in points], [b for _, b in points], label=curve, color=f"C{at % 10}", markersize=4,
                       marker="osv^D"[at // 10 % 5] if marker else "", linestyle="-" if len(points) > 1 else "")
        panel.set(title=name, xlabel=x, ylabel=(y if i % wide == 0 else "") if isinstance(y, str) else y[i])
        panel.set_xscale("log" if log else "linear")
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    for panel in axes[len(panels):]:
        panel.set_axis_off()
    if len(names) > 1:
        handles = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(),
                                                                            strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="small", color="0.4")
    figure.savefig(path, dpi=130)


def plot_run(path: Path, metrics: Path, title: str = "") -> None:
    """Draws the losses, the acceptance by depth and the held-out figures of a training run by step.

    Args:
        path: the file to write (PNG, SVG or PDF).
        metrics: the run's `metrics.jsonl`.
        title: title of the figure.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in metrics.read_text("utf-8").splitlines():
        entry = json.loads(line)
        for name, value in entry.items():
            if name not in ("step", "tokens", "seconds", "rate", "tokens_per_second"):
                learned, depth = "loss" in entry, name.removeprefix("accepted_").removeprefix("held_out_")
                kind = "training" if learned else "held out"
                if depth.isdigit() or name == "acceptance":
                    panel, curve = f"acceptance, {kind}", f"draft {depth}" if depth.isdigit() else name
                else:
                    panel, curve = (kind, name.replace("_", " ")) if learned else (name.replace("_", " "), kind)
                panels.setdefault(panel, {}).setdefault(curve, []).append((entry["step"], value))
    label = lambda panel: "probability" if panel.startswith("acc") else "nats" if panel == "training" else ""
    plot_lines(path, panels, "step", [label(panel) for panel in panels], title, marker=False)


@contextlib.contextmanager
def reporting() -> Iterator[Callable[[int, int, str], None]]:
    """Yields `report(done, total, what)`, which advances a progress bar on standard error, or prints a line there if it
    is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            progress.update(bar, completed=done, total=total, description=what)
            if not console.is_terminal:
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield report


def check_writable(*paths: Path | None) -> None:
    """Checks before long work that files can be written.

    Raises:
        ValueError: the directory of a path does not exist.
    """
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: its directory does not exist")
