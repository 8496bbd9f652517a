"""What of the drafts is accepted that a model makes on a smaller cache of its own: `evaluate.py --caches --drafts`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

DRAFTS = ("full", "magicdec:budget=128", "magicdec:budget=256", "magicdec:budget=512",
          "magicdec:budget=256,keep=sink-window", "quantspec:group=64,weights=None", "quantspec:group=64")


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Drafts of a model on another cache of its own.

    Attributes:
        system: as it was asked for; "full" drafts on the whole cache.
        accepted: share of the drafts. per_forward: new tokens for each forward of the whole model. same: share of
            answers that are token for token those of plain decoding on the target's cache.
    """

    system: str
    accepted: float
    per_forward: float
    same: float


def run(lm: Any, systems: Sequence[str] = DRAFTS, *, problems: int = 20, length: int = 1024, seed: int = 0,
        report: Callable[[int, int, str], None] | None = None) -> list[Drafted]:
    """Answers the questions with drafts on smaller caches.

    Args:
        lm: what `dx.load` gave, with the vocabulary of `recall.py`.
        problems: of each task. length: words of the texts. seed: of the problems.
        report: told before each system: systems done, systems in all, what runs now.

    Raises:
        ValueError: an unknown system or option.
    """
    import recall

    import decodax as dx
    from decodax.algorithms.speculative.drafts import OwnCache
    from decodax.cache import dense
    from decodax.common.registry import ALGORITHMS, parse_options

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


def show(lm: Any, **options: Any) -> int:
    """Measures, with progress on stderr, and prints the table; the exit status."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    table = Table("drafts on", "accepted", "tokens/forward", "same answers", box=None)
    with console.status("") as status:

        def report(done: int, total: int, what: str) -> None:
            status.update(f"{done}/{total} {what}")
            if not console.is_terminal:
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        for row in run(lm, report=report, **options):
            table.add_row(row.system, f"{row.accepted:.3f}", f"{row.per_forward:.2f}", f"{row.same:.1%}")
    Console(highlight=False, width=None if sys.stdout.isatty() else 1000).print(table)
    return 0
