"""Samples, votes and searches with a model that errs: right answers against tokens.

Rewards come from a verifier that checks the lines written so far and is wrong about a share of the texts, always the
same ones: it is neither an oracle nor a trained model.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from decodax import search, select
from decodax.algorithms.beams import BeamSearch
from decodax.bench.problems import sums
from decodax.front.generate import generate


class SearchFigures(NamedTuple):
    """The result of one method with a number of rows: the share of right answers to `problems`, the mean number of
    tokens generated for a problem, all rows included, and the seconds of the whole run."""

    method: str
    rows: int
    right: float
    problems: int
    tokens: float
    seconds: float


class StepVerifier:
    """An artificial verifier with a known error rate: scores a partial solution 0.9 if all its lines are right and 0.1
    if not, or, for a fixed share `errors` of the texts, the other way round."""

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
    """Returns the last line of a solution if it is a result, which has two characters; else None."""
    line = text.rsplit("\n", 1)[-1]
    return line if len(line) == 2 else None


def _chosen(rule: Callable[[StepVerifier], Any]) -> Callable[[StepVerifier, int], dict[str, Any]]:
    return lambda verifier, n: dict(select=rule(verifier), num_samples=n) if n > 1 else {}


METHODS: dict[str, Callable[[StepVerifier, int], dict[str, Any] | None]] = {
    "beams": lambda verifier, n: dict(temperature=0.0, **(dict(
        algorithm=BeamSearch(n), num_samples=1) if n > 1 else {})),
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


def measure(lm: Any, problems: Sequence[sums.Sum], method: str, rows: int, verifier: StepVerifier, temperature: float,
            seed: int) -> SearchFigures | None:
    """Runs one method with `rows` rows for each problem and returns its figures; None if the method cannot run with
    this number. `verifier` scores partial solutions, `temperature` and `seed` are those of sampling."""
    given, most = METHODS[method](verifier, rows), 9 * len(problems[0].steps) + 8
    if given is None:
        return None
    options = dict(max_new_tokens=most, temperature=temperature, seed=seed) | given
    prompts, clock = [p.prompt for p in problems], time.perf_counter()
    if "search" in given:
        out: Any = search.explore(lm, prompts, options.pop("search"), until="\n", **options)
        tokens = float(out.tokens)
    else:
        out = generate(lm, prompts, **options)
        # a beam generates a token a step; of samples a character is a token, and so is their end
        tokens = float(out.lengths.sum()) * (rows if method == "beams" else 1)
        if "select" in given:
            tokens = float(sum(len(text) + (len(text) < most) for text in out.findings["texts"].flat))
    right = sum(last(text) == p.result for text, p in zip(out.text, problems, strict=True))
    return SearchFigures(method, rows, right / len(problems), len(problems), tokens / len(problems),
                    time.perf_counter() - clock)
