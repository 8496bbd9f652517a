"""Samples, votes and searches with a model that errs: right answers against tokens.

The sums are those of `recipes/sums.py`, which the shipped `sums` works out step by step. Rewards come from a verifier
that checks the lines written so far and is wrong about one text in ten (`--errors`), always the same ones: it is
neither an oracle nor a trained model. Tokens are all that were generated for a problem, discarded or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import decodax as dx
from decodax import search, select
from decodax.bench.figures import check_writable, plot_lines, reporting, show_table
from recipes import sums


@dataclasses.dataclass(frozen=True)
class Measured:
    """A method at one size.

    Attributes:
        method: name. rows: rows of a problem. right: share of right answers. count: number of problems.
        tokens: mean number generated for a problem. seconds: of the whole run.
    """

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


Answers = tuple[list[str], float]
"""The text of each problem, and the number of tokens that were generated for all of them."""

Method = Callable[[Any, list[str], int, Verifier, dict[str, Any]], Answers]


def _chosen(by: Any) -> Method:
    def run(lm: Any, prompts: list[str], n: int, verifier: Verifier, options: dict[str, Any]) -> Answers:
        rule = by(verifier)
        drawn = dx.generate(lm, prompts, num_samples=n, logprobs=0, **options)
        assert drawn.text is not None and drawn.logprobs is not None
        texts = []
        for p, prompt in enumerate(prompts):
            rows = slice(p * n, p * n + n)
            each = select.Candidates(drawn.text[rows], prompt, drawn.logprobs.raw[rows].sum(1).astype(float),
                                     drawn.lengths[rows].astype(int))
            texts.append(drawn.text[p * n + rule.choose(each).index])
        return texts, float(drawn.lengths.sum())

    return run


def _explored(make: Callable[[Verifier, int], search.Explorer | None]) -> Method:
    def run(lm: Any, prompts: list[str], n: int, verifier: Verifier, options: dict[str, Any]) -> Answers:
        search = make(verifier, n)
        if search is None:
            return [], 0.0
        out = search.explore(lm, prompts, search, until="\n", **options)
        return out.text, float(out.tokens)

    return run


def _beams(lm: Any, prompts: list[str], n: int, verifier: Verifier, options: dict[str, Any]) -> Answers:
    plain = {k: v for k, v in options.items() if k != "temperature"}
    beams = dict(algorithm=dx.algorithms.beam_search(n), num_samples=1) if n > 1 else {}
    out = dx.generate(lm, prompts, **plain, **beams)
    assert out.text is not None
    # a beam generates a token a step
    return out.text, float(out.lengths.sum()) * n


METHODS: dict[str, Method] = {
    "beams": _beams,
    "majority": _chosen(lambda verifier: select.SelfConsistency(last)),
    "mbr": _chosen(lambda verifier: select.MBR()),
    "likelihood": _chosen(lambda verifier: select.Likelihood(0.0)),
    "best-of-n": _chosen(select.BestOfN),
    "particle-filter": _explored(lambda verifier, n: search.ParticleFilter(verifier, n=n)),
    "step-beams": _explored(lambda verifier, n: None if n < 2 else search.StepBeams(verifier, n, max(n // 4, 2))),
    "a-star": _explored(lambda verifier, n: None if n < 4 else search.AStar(verifier, n=n, branch=3, expansions=2 * n))}
"""Methods by name. With one row "beams" is greedy decoding, and the others are one sample."""


def measure(lm: Any, problems: Sequence[sums.Sum], method: str, rows: int, verifier: Verifier, temperature: float,
            seed: int) -> Measured | None:
    """Runs one method at one size; None if it has no such size."""
    options = dict(max_new_tokens=9 * len(problems[0].steps) + 8, temperature=temperature, seed=seed)
    clock = time.perf_counter()
    texts, tokens = METHODS[method](lm, [p.prompt for p in problems], rows, verifier, options)
    if not texts:
        return None
    right = sum(last(text) == p.result for text, p in zip(texts, problems, strict=True))
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
        for i, method in enumerate(methods):
            for j, rows in enumerate(args.rows):
                report(i * len(args.rows) + j, len(methods) * len(args.rows), f"{method}, {rows} rows")
                one = measure(lm, problems, method, rows, verifier, args.temperature, args.seed)
                found += [] if one is None else [one]
    by = {(m.method, m.rows): f"{m.right:.0%} ({m.tokens:.0f})" for m in found}
    show_table(["method", *(f"{n} row{'s' * (n > 1)}" for n in args.rows)],
               [[name, *(by.get((name, n), "") for n in args.rows)] for name in methods], markdown=True)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(m) for m in found], indent=1) + "\n")
    if args.plot:
        title = (f"{args.problems} sums of {args.numbers} numbers, temperature {args.temperature:g}, a verifier with "
                 f"{args.errors:.0%} errors")
        plot_lines(args.plot, {"": {name: sorted((m.tokens, 100 * m.right) for m in found if m.method == name)
                                    for name in methods}}, "tokens for a problem", "right answers, %", title, log=True)
