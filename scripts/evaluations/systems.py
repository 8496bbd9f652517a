"""Accuracy against parallelism (`decodax.bench.grid`), as tables and plots: right answers, outputs that equal those of
the first point token for token, new tokens a forward (of a row, its end token included), forwards a row, and tokens a
second of the decode loop (median of the repeats, without compiling).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

import jax

import decodax as dx
from decodax.bench.figures import check_writable, plot_lines, reporting, show_table
from decodax.bench.grid import COLUMNS, points, run
from decodax.bench.problems import puzzles as source


def main(args: argparse.Namespace) -> int:
    """Runs the grid; returns 1 if a point failed."""
    tasks = list(source.TASKS) if "all" in args.task else list(dict.fromkeys(args.task))
    if unknown := [task for task in tasks if task not in source.TASKS]:
        raise ValueError(f"--task: got {unknown[0]}, takes all, {', '.join(source.TASKS)}")
    check_writable(args.plot, args.json)
    lm = dx.load(args.model)
    grid = points(args.systems, lm, dx.load(args.draft) if args.draft else None)
    with reporting() as report:
        rows = run(lm, grid, tasks, problems=args.problems, batch=args.batch, seed=args.seed, repeats=args.repeats,
                   temperature=args.temperature, report=report)
    setting = (f"{lm.name}, {args.problems} problems a task, batch {args.batch}, seed {args.seed}, temperature "
               f"{args.temperature:g}; {jax.devices()[0].device_kind}, {os.cpu_count()} cores; JAX {jax.__version__}")
    if args.markdown:
        print(f"    {args.line}\n")
    show_table(COLUMNS, [row.cells() for row in rows], setting, args.markdown)
    if args.json:
        args.json.write_text(json.dumps({"command": args.line, "setting": setting,
                                         "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n")
    if args.plot:
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for row in sorted((row for row in rows if row.error is None), key=lambda row: row.tokens_per_forward):
            panels.setdefault(row.task, {}).setdefault(row.curve, []).append(
                (row.tokens_per_forward, 100 * row.accuracy))
        plot_lines(args.plot, panels, "tokens a forward", "right, %", setting)
    for row in rows:
        if row.error:
            print(f"evaluate.py: {row.system} failed on {row.task}: {row.error}", file=sys.stderr)
    return int(any(row.error for row in rows))
