"""Samples, votes and searches with a model that errs: right answers against tokens.

The sums are those of `recipes/sums.py`, which the shipped `sums` works out step by step. Rewards come from a verifier
that checks the lines written so far and is wrong about one text in ten (`--errors`), always the same ones: it is
neither an oracle nor a trained model. Tokens are all that were generated for a problem, discarded or not.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import decodax as dx
from decodax import search, select
from decodax.bench.figures import check_writable, plot_lines, reporting, show_table
from recipes import sums


class Measured(NamedTuple):
    """A method with a number of rows: share of right answers to `count` problems, mean number of tokens generated for a
    problem, and seconds of the whole run."""

    method: str
    rows: int
    right: float
    count: int
    tokens: float
    seconds: float


class Verifier:
    """Returns 0.9 for texts that are right so far and 0.1 for others, and the opposite for a share of texts."""

    def __init__(self, problems: Sequence[sums.Sum], errors: float):
        self.problems, self.errors = {p.prompt: p for p in problems}, errors

    def __call__(self, prompt: str, texts: Sequence[str]) -> list[float]:
        out = []
        for text in texts:
            right, done = sums.right_steps(self.problems[prompt], text)
            wrong = zlib.crc32(f"{prompt}|{text}".encode()) % 1000 < 1000 * self.errors
            out.append(0.9 if (right == done) != wrong else 0.1)
        return out


def last(text: str) -> str | None:
    """Returns the answer of a text."""
    line = text.rsplit("\n", 1)[-1]
    return line if len(line) == 2 else None


def _chosen(rule: Callable[[Verifier], Any]) -> Callable[[Verifier, int], dict[str, Any]]:
    return lambda verifier, n: dict(select=rule(verifier), num_samples=n) if n > 1 else {}


METHODS: dict[str, Callable[[Verifier, int], dict[str, Any] | None]] = {
    "beams": lambda verifier, n: dict(temperature=0.0, **(dict(
        algorithm=dx.algorithms.beam_search(n), num_samples=1) if n > 1 else {})),
    "majority": _chosen(lambda verifier: select.SelfConsistency(last)),
    "mbr": _chosen(lambda verifier: select.MBR()),
    "likelihood": _chosen(lambda verifier: select.Likelihood(0.0)),
    "best-of-n": _chosen(select.BestOfN),
    "particle-filter": lambda verifier, n: dict(search=search.ParticleFilter(verifier, n=n)),
    "step-beams": lambda verifier, n: dict(search=search.StepBeams(verifier, n, max(n // 4, 2))) if n > 1 else None,
    "a-star": lambda verifier, n: dict(search=search.AStar(verifier, n=n, branch=3, expansions=2 * n)) if n > 3 else
    None}
"""Keywords of `dx.generate` by name, or None where there is no such size. With one row "beams" is greedy decoding, and
the others are one sample."""


def measure(lm: Any, problems: Sequence[sums.Sum], method: str, rows: int, verifier: Verifier, temperature: float,
            seed: int) -> Measured | None:
    """Runs one method at one size; None if it has no such size."""
    given, most = METHODS[method](verifier, rows), 9 * len(problems[0].steps) + 8
    if given is None:
        return None
    options = dict(max_new_tokens=most, temperature=temperature, seed=seed) | given
    prompts, clock = [p.prompt for p in problems], time.perf_counter()
    if "search" in given:
        out: Any = search.explore(lm, prompts, options.pop("search"), until="\n", **options)
        tokens = float(out.tokens)
    else:
        out = dx.generate(lm, prompts, **options)
        # a beam generates a token a step; of samples a character is a token, and so is their end
        tokens = float(out.lengths.sum()) * (rows if method == "beams" else 1)
        if "select" in given:
            tokens = float(sum(len(text) + (len(text) < most) for text in out.findings["texts"].flat))
    right = sum(last(text) == p.result for text, p in zip(out.text, problems, strict=True))
    return Measured(method, rows, right / len(problems), len(problems), tokens / len(problems),
                    time.perf_counter() - clock)


def main(args: argparse.Namespace) -> None:
    """Measures and prints a table: right answers, and in brackets tokens."""
    methods = args.methods or list(METHODS)
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"--methods: got {unknown[0]}, takes {', '.join(METHODS)}")
    check_writable(args.plot, args.json)
    problems = sums.problems(args.problems, args.numbers, args.seed)
    lm, verifier, found = dx.load(args.model), Verifier(problems, args.errors), list[Measured]()
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
