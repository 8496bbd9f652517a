"""The plot of a comparison of decoding methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def draw(path: str | Path, cells: Mapping[tuple[str, int], Sequence[Any]], setting: str) -> None:
    """Draws speedup and mean accepted length in two panels, with one line for each method and one marker for each task
    and batch size, and in a third the share of rounds that accept 1, 2, ... drafts, over all tasks.

    Args:
        path: the file, a PNG, SVG or PDF.
        cells: by task and batch size, the `decodax.bench.comparison.Row` of each method that was measured.
        setting: a line below the panels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.system for rows in cells.values() for row in rows))
    tasks, batches = list(dict.fromkeys(task for task, _ in cells)), sorted({batch for _, batch in cells})
    height = 1.9 + 0.34 * max(len(names), 1)
    figure = Figure(figsize=(11, 3.0 + height), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(height, 3.0))
    above, below = parts
    left, right = above.subplots(1, 2, sharey=True)
    for i, ((task, batch), rows) in enumerate(cells.items()):
        offset = 0.6 * ((i + 0.5) / len(cells) - 0.5)       # the markers of one method lie below each other
        style: dict[str, Any] = dict(color=f"C{tasks.index(task)}", marker="osD^v"[batches.index(batch) % 5],
                                     linestyle="", markersize=5, capsize=2)
        timed = [row for row in rows if row.speedup is not None and row.spread is not None]
        middle = np.array([row.speedup for row in timed], float)
        ends = np.array([row.spread for row in timed], float).reshape(-1, 2)
        left.errorbar(middle, [names.index(row.system) + offset for row in timed], label=f"{task}, batch {batch}",
                      xerr=(middle - ends[:, 0], ends[:, 1] - middle), **style)
        right.errorbar([row.mean_accepted_length for row in rows],
                       [names.index(row.system) + offset for row in rows], **style)
    for axis, label in ((left, "speedup: tokens/s over plain decoding's (median, lowest to highest)"),
                        (right, "mean accepted length: 1 + accepted drafts a round")):
        axis.axvline(1.0, color="0.4", linewidth=1)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(axis="x", color="0.9")
        axis.set_axisbelow(True)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(max(len(names), 1) - 0.5, -0.5)
    if cells:
        above.legend(loc="outside upper center", ncols=min(len(cells), 3), frameon=False)
    _depths(below.subplots(), names, [row for rows in cells.values() for row in rows])
    figure.supxlabel(setting, fontsize="small", color="0.4")
    figure.savefig(path, dpi=150)


def _depths(axis: Any, names: Sequence[str], rows: Sequence[Any]) -> None:
    """Draws the acceptance by depth of each method, averaged over tasks and batch sizes."""
    for name in names:
        found = [row.accepted_by_depth for row in rows if row.system == name]
        mean = [float(np.mean([x[j] if j < len(x) else 0.0 for x in found])) for j in range(max(map(len, found)))]
        axis.plot(range(1, len(mean) + 1), mean, marker=".", label=name)
    axis.set(xlabel="drafts accepted, at least", ylabel="share of rounds", xlim=(0.9, None), ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(color="0.9")
    if 0 < len(names) <= 20:                # colours repeat after 10
        axis.legend(loc="upper right", ncols=1 + len(names) // 8, fontsize="small", frameon=False)


__all__ = ["draw"]
