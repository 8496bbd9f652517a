"""Samples, votes and searches on `sums`: right answers against tokens (`decodax.bench.searches`)."""

from __future__ import annotations

import argparse
import json

import decodax as dx
from decodax.bench.figures import check_writable, plot_lines, reporting, show_table
from decodax.bench.problems import sums
from decodax.bench.searches import METHODS, SearchFigures, StepVerifier, measure


def main(args: argparse.Namespace) -> None:
    """Measures and prints a table: right answers, and in brackets tokens."""
    methods = args.methods or list(METHODS)
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"--methods: got {unknown[0]}, takes {', '.join(METHODS)}")
    check_writable(args.plot, args.json)
    problems = sums.problems(args.problems, args.numbers, args.seed)
    lm, verifier, found = dx.load(args.model), StepVerifier(problems, args.errors), list[SearchFigures]()
    with reporting() as report:
        for i, (method, rows) in enumerate(cases := [(method, rows) for method in methods for rows in args.rows]):
            report(i, len(cases), f"{method}, {rows} rows")
            one = measure(lm, problems, method, rows, verifier, args.temperature, args.seed)
            found += [] if one is None else [one]
    by = {(m.method, m.rows): f"{m.right:.0%} ({m.tokens:.0f})" for m in found}
    show_table(["method", *(f"{n} row{'s' * (n > 1)}" for n in args.rows)],
               [[name, *(by.get((name, n), "") for n in args.rows)] for name in methods], markdown=True)
    if args.json:
        args.json.write_text(json.dumps([m._asdict() for m in found], indent=1) + "\n")
    if args.plot:
        title = (f"{args.problems} sums of {args.numbers} numbers, temperature {args.temperature:g}, a verifier with "
                 f"{args.errors:.0%} errors")
        plot_lines(args.plot, {"": {name: sorted((m.tokens, 100 * m.right) for m in found if m.method == name)
                                    for name in methods}}, "tokens for a problem", "right answers, %", title, log=True)
