"""Share of drafts that are accepted when a model drafts on a smaller cache of its own, on the questions of `recall`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import decodax as dx
from decodax.algorithms.speculative.drafts import OwnCache
from decodax.bench.figures import reporting, show_table
from decodax.cache import dense
from decodax.common.registry import ALGORITHMS
from decodax.common.strings import parse_options
from recipes import recall

DRAFTS = ("full", "magicdec:budget=128", "magicdec:budget=256", "magicdec:budget=512",
          "magicdec:budget=256,keep=sink-window", "quantspec:group=64,weights=None", "quantspec:group=64")


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Drafts of a model on another cache of its own.

    Attributes:
        system: name with options; "full" drafts on the whole cache.
        accepted: share of the drafts. per_forward: new tokens for each forward of the whole model. same: share of
            answers that equal those of plain decoding on the target's cache token for token.
    """

    system: str
    accepted: float
    per_forward: float
    same: float


def run(lm: Any, systems: Sequence[str] = DRAFTS, *, problems: int = 20, length: int = 1024, seed: int = 0,
        report: Callable[[int, int, str], None] | None = None) -> list[Drafted]:
    """Answers the questions with drafts on smaller caches.

    Args:
        lm: a model with the vocabulary of `recipes/recall.py`.
        problems: number of each task. length: words of the texts. seed: seed of the problems.
        report: called before each system with the systems done, the systems in all, and the name of this one.

    Raises:
        ValueError: an unknown system or option.
    """
    prompts = [p.prompt for task in recall.ANSWERED for p in recall.problems(task, problems, length, seed)]
    out = []
    for done, text in enumerate(systems):
        if report is not None:
            report(done, len(systems), text)
        name = text.partition(":")[0]
        given = {} if name == "full" else parse_options(text, ALGORITHMS[name].options)
        method = dx.Speculative(OwnCache(lm, dense)) if name == "full" else dx.algorithms.make(name, lm, **given)
        kind = method.draft.kind if method.draft.alone else None
        plain = dx.generate(lm, prompts, cache=kind, max_new_tokens=24)
        drafted = dx.generate(lm, prompts, algorithm=method, max_new_tokens=24)
        same = [a[:n].tolist() == b[:m].tolist() for a, n, b, m in
                zip(plain.tokens, plain.lengths, drafted.tokens, drafted.lengths, strict=True)]
        stats = drafted.stats
        out.append(Drafted(text, float(stats.accepted.sum() / stats.drafted.sum()), stats.tokens_per_forward,
                           sum(same) / len(same)))
    return out


def main(args: argparse.Namespace) -> None:
    """Measures and prints a table."""
    with reporting() as report:
        rows = run(dx.load(args.model), problems=args.problems, length=args.length, seed=args.seed, report=report)
    show_table(("drafts on", "accepted", "tokens/forward", "same answers"), [
        (row.system, f"{row.accepted:.3f}", f"{row.per_forward:.2f}", f"{row.same:.1%}") for row in rows])
