"""Share of drafts that are accepted when a model drafts on a smaller cache of its own, on the questions of `recall`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.algorithms.speculative.drafts import OwnCache
from decodax.bench.figures import show_table
from decodax.cache import dense
from decodax.common.registry import ALGORITHMS
from recipes import recall

DRAFTS = ("full", "magicdec:budget=128", "magicdec:budget=256", "magicdec:budget=512",
          "magicdec:budget=256,keep=sink-window", "quantspec:group=64,weights=None", "quantspec:group=64")


class Drafted(NamedTuple):
    """A draft by name ("full" is on the whole cache), the share of its tokens that are accepted, new tokens for each
    forward of the whole model, and the share of answers that equal plain decoding's on the target's cache."""

    system: str
    accepted: float
    per_forward: float
    same: float


def run(lm: Any, systems: Sequence[str] = DRAFTS, *, problems: int = 20, length: int = 1024,
        seed: int = 0) -> list[Drafted]:
    """Answers the questions with drafts on smaller caches.

    Args:
        lm: a model with the vocabulary of `recipes/recall.py`.
        problems: number of each task. length: words of the texts. seed: seed of the problems.
    """
    prompts = [p.prompt for task in recall.ANSWERED for p in recall.problems(task, problems, length, seed)]
    out = []
    for text in track(systems, "drafting", console=Console(stderr=True)):
        method = dx.Speculative(OwnCache(lm, dense)) if text == "full" else ALGORITHMS.object(text, lm)
        plain, drafted = (dx.generate(lm, prompts, max_new_tokens=24, **given) for given in (
            dict(cache=method.draft.kind if method.draft.alone else None), dict(algorithm=method)))
        same = [plain.row(i).tolist() == drafted.row(i).tolist() for i in range(len(prompts))]
        stats = drafted.stats
        out.append(Drafted(text, float(stats.accepted.sum() / stats.drafted.sum()), stats.tokens_per_forward,
                           sum(same) / len(same)))
    return out


def main(args: argparse.Namespace) -> None:
    """Measures and prints a table."""
    rows = run(dx.load(args.model), problems=args.problems, length=args.length, seed=args.seed)
    show_table(("drafts on", "accepted", "tokens/forward", "same answers"), [
        (row.system, f"{row.accepted:.3f}", f"{row.per_forward:.2f}", f"{row.same:.1%}") for row in rows])
