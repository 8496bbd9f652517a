"""Accuracy of cache policies on long texts (`decodax.bench.cache_accuracy`), as tables and plots."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import decodax as dx
from decodax.bench.cache_accuracy import CacheFigures, best, means, run, run_drafts
from decodax.bench.figures import check_writable, plot_lines, reporting, show_table
from decodax.bench.problems import recall
from decodax.common.registry import CACHES


def table(rows: Sequence[CacheFigures]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows of the table: right answers in percent, by mode, and the bytes kept."""
    found, modes = means(rows), list(dict.fromkeys(row.mode for row in rows))
    shares = sorted({share for _, share, _ in found if share is not None})

    def cell(policy: str, share: float | None) -> str:
        own = [found[policy, share, mode] for mode in modes if (policy, share, mode) in found]
        right = ", ".join(f"{100 * mean:.1f}±{100 * spread:.1f}" for mean, spread, _ in own)
        return f"{right} ({own[0][2]:.2f})" if own else ""

    lines = [[policy, *(cell(policy, share) for share in (None, *shares))]
             for policy in dict.fromkeys(row.policy for row in rows)]
    for i, share in enumerate(shares):
        named = "; ".join(", ".join(best(rows, mode, share)) for mode in modes)
        lines.append([f"best at {share:.0%} removed", *[""] * (1 + i), named, *[""] * (len(shares) - 1 - i)])
    return ["policy", "its own size", *(f"{share:.0%} removed" for share in shares)], lines


def main(args: argparse.Namespace) -> None:
    """Measures, or reads earlier figures, and prints, writes and draws them."""
    if args.command == "drafts":
        return drafts(args)
    check_writable(args.plot, args.json)
    if args.figures:
        facts = [json.loads(path.read_text()) for path in args.figures]
        rows = [CacheFigures(**row) for fact in facts for row in fact["rows"]]
        return _show(args, rows, facts[0]["setting"], "; ".join(fact["command"] for fact in facts))
    policies = args.policies or [name for name, entry in CACHES.items() if entry.guarantee != "exact"]
    tasks, lm = args.task or list(recall.ANSWERED), dx.load(args.model)
    setting = (f"{lm.name}, texts of {args.length} words, {args.problems} problems each of {', '.join(tasks)}, seeds "
               f"{', '.join(map(str, args.seeds))}, greedy; {jax.devices()[0].device_kind}, {os.cpu_count()} cores; "
               f"JAX {jax.__version__}")
    known: list[CacheFigures] = []
    if args.json and args.json.exists():
        try:
            facts = json.loads(args.json.read_text())
            known, before = [CacheFigures(**row) for row in facts["rows"]], facts["setting"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{args.json}: is there, and was not written by --json; takes another name") from error
        if before != setting:
            raise ValueError(f"{args.json}: holds figures of another setting ({before}); takes another name")
    left_out: list[str] | None = None if args.policies else []      # a policy that was given by name is not left out
    with reporting() as report:
        rows = run(lm, policies, removed=args.removed, modes=args.mode, tasks=tasks, problems=args.problems,
                   length=args.length, seeds=args.seeds, report=report, known=known, left_out=left_out,
                   save=lambda rows: _write(args.json, rows, setting, args.line))
    for line in dict.fromkeys(left_out or []):
        print(f"left out: {line}", file=sys.stderr)
    _show(args, rows, setting, args.line)


def _write(path: Path | None, rows: Sequence[CacheFigures], setting: str, command: str) -> None:
    if path is not None:
        whole = path.with_name(path.name + ".part")
        whole.write_text(json.dumps({"command": command, "setting": setting,
                                     "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n")
        whole.replace(path)


def _show(args: argparse.Namespace, rows: Sequence[CacheFigures], setting: str, command: str) -> None:
    """Prints the table, and writes and draws what is asked for."""
    print(f"    {command}\n\n{setting}.\n" if args.markdown else setting)
    modes = ", ".join(dict.fromkeys(row.mode for row in rows))
    show_table(*table(rows), f"right answers in percent, {modes} (bytes kept)", args.markdown)
    _write(args.json, rows, setting, command)
    if args.plot:
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for (policy, _, mode), (mean, _, kept) in sorted(means(rows).items(), key=lambda item: item[1][2]):
            title = f"question seen by the policy: {'yes' if mode == 'aware' else 'no'}"
            panels.setdefault(title, {}).setdefault(policy, []).append((100 * kept, 100 * mean))
        plot_lines(args.plot, panels, "bytes kept, %", "right answers, %", setting)


def drafts(args: argparse.Namespace) -> None:
    """Share of drafts that are accepted when a model drafts on a smaller cache of its own."""
    rows = run_drafts(dx.load(args.model), problems=args.problems, length=args.length, seed=args.seed)
    show_table(("drafts on", "accepted", "tokens/forward", "same answers"), [
        (row.system, f"{row.accepted:.3f}", f"{row.per_forward:.2f}", f"{row.same:.1%}") for row in rows])


