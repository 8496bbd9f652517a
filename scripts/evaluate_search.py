"""What samples, votes and searches make of a model that errs: right answers against tokens.

    python scripts/evaluate_search.py --plot docs/search.png                # every method, with 1 to 32 rows a problem
    python scripts/evaluate_search.py --methods majority particle-filter --rows 4 16 --problems 50

The sums are those of `scripts/sums.py`, which the shipped `sums` works out step by step. Rewards come from a verifier
that checks the lines written so far and is wrong about one text in ten, whichever it is (`--errors`): so it is neither
an oracle nor a trained model, and what it says of a text does not change. Tokens are all that were made for a problem,
given up or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sums

import decodax as dx
from decodax import search, select

ROWS = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A method at one size. Attributes: method; rows: of a problem; right: share of right answers, and of which count;
    tokens: made for a problem, on average; seconds: of the whole run."""

    method: str
    rows: int
    right: float
    count: int
    tokens: float
    seconds: float


class Verifier:
    """Says of a text how likely it is to be right so far: 0.9 or 0.1, and the other one for a share of texts."""

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
    """The answer of a text."""
    line = text.rsplit("\n", 1)[-1]
    return line if len(line) == 2 else None


Answers = tuple[list[str], float]
"""The text of each problem, and how many tokens were made for all of them."""

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
    out = dx.generate(lm, prompts, **plain,
                      **(dict(algorithm=dx.algorithms.beam_search(n), num_samples=1) if n > 1 else {}))
    assert out.text is not None
    # a beam makes a token a step
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
"""What is compared. With one row "beams" is greedy decoding, and the others one sample."""


def measure(lm: Any, problems: Sequence[sums.Sum], method: str, rows: int, verifier: Verifier, temperature: float,
            seed: int) -> Measured | None:
    """One method at one size; None where it has no such size."""
    options = dict(max_new_tokens=9 * len(problems[0].steps) + 8, temperature=temperature, seed=seed)
    clock = time.perf_counter()
    texts, tokens = METHODS[method](lm, [p.prompt for p in problems], rows, verifier, options)
    if not texts:
        return None
    right = sum(last(text) == p.result for text, p in zip(texts, problems, strict=True))
    return Measured(method, rows, right / len(problems), len(problems), tokens / len(problems),
                    time.perf_counter() - clock)


def table(found: Sequence[Measured]) -> str:
    """Right answers and tokens by method and rows, as Markdown."""
    sizes = sorted({m.rows for m in found})
    line = lambda cells: "| " + " | ".join(cells) + " |"
    cell = lambda m: f"{m.right:.0%} ({m.tokens:.0f})" if m else ""
    by = {(m.method, m.rows): m for m in found}
    names = dict.fromkeys(m.method for m in found)
    return "\n".join([line(["method", *(f"{n} row{'s' * (n > 1)}" for n in sizes)]), line(["---"] * (len(sizes) + 1)),
                      *(line([name, *(cell(by.get((name, n))) for n in sizes)]) for name in names)])


def plot(found: Sequence[Measured], path: Path, title: str) -> None:
    """Draws right answers against tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    panel: Any = figure.subplots()
    for i, name in enumerate(dict.fromkeys(m.method for m in found)):
        points = sorted((m.tokens, m.right) for m in found if m.method == name)
        panel.plot([x for x, _ in points], [100 * y for _, y in points], marker="osD^v<>P"[i % 8], label=name)
    panel.set_xscale("log")
    panel.set_xlabel("tokens made for a problem")
    panel.set_ylabel("right answers, %")
    panel.set_title(title, fontsize="medium")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="sums", help="the model (default: sums)")
    p.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME",
                   help=f"of {', '.join(METHODS)}; default: all")
    p.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N", help="rows of a problem")
    p.add_argument("--problems", type=int, default=200, help="held-out sums (default: 200)")
    p.add_argument("--numbers", type=int, default=6, help="numbers of a sum (default: 6)")
    p.add_argument("--temperature", type=float, default=0.8, help="of samples (default: 0.8)")
    p.add_argument("--errors", type=float, default=0.1, help="share of texts that the verifier is wrong about")
    p.add_argument("--seed", type=int, default=0, help="of problems and samples")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw right answers against tokens, as PNG, SVG or PDF")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    args = p.parse_args(argv)
    problems = sums.problems(args.problems, args.numbers, args.seed)
    lm, verifier, found = dx.load(args.model), Verifier(problems, args.errors), []
    for method in args.methods:
        for rows in args.rows:
            one = measure(lm, problems, method, rows, verifier, args.temperature, args.seed)
            if one is not None:
                found.append(one)
                print(f"{method:16} {rows:3} rows  {one.right:6.1%} right  {one.tokens:7.0f} tokens  "
                      f"{one.seconds:6.1f} s", file=sys.stderr, flush=True)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(m) for m in found], indent=1) + "\n")
    if args.plot:
        plot(found, args.plot, f"{args.problems} sums of {args.numbers} numbers, temperature {args.temperature:g}, "
             f"a verifier with {args.errors:.0%} errors")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
