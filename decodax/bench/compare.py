"""Compares decoding methods on one model with the same prompts, each against plain decoding in the same run.

    lm = dx.load("pycode")
    found = compare(lm, {"lookup": dx.Speculative(dx.drafts.PromptLookup(length=7))}, tasks=["copy-edit"], batch=[1])
    print(found.markdown())

`decodax compare` does this for the methods of `decodax.algorithms`; docs/choose/drafts.md explains the columns.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from decodax.algorithms.plain import Autoregressive
from decodax.bench.comparison import PLAIN, Comparison, Row
from decodax.bench.tasks import TASKS, Task, copied
from decodax.core.algorithm import Algorithm
from decodax.engine.compilation import crowded, drop_programs
from decodax.engine.result import Result, Statistics, json_ready
from decodax.front.generate import generate
from decodax.io.load import LM

ROOM = 0.4
"""The share of the process's memory maps that compiled programs may hold between runs. It is lower than the share at
which every call of `generate` drops programs (`decodax.engine.compilation.keep_room`)."""

Report = Callable[[int, int, str], None]
"""A function that is called before each run with the number of finished runs, the number of all runs and a description
of the run that starts."""

Contender = Algorithm | Callable[[int], Algorithm]
"""An algorithm, or a function that makes it for a batch size."""


def _by_depth(stats: Sequence[Statistics]) -> tuple[float, ...]:
    """Returns the share of rounds in which at least 1, 2, ... drafts were accepted, up to the last that ever was."""
    shares = np.array([s.acceptance_per_position for s in stats])
    many = np.array([s.rounds.sum() for s in stats])
    return tuple(float(x) for x in np.trim_zeros(many @ shares / max(many.sum(), 1), "b"))


def compare(lm: LM, algorithms: Mapping[str, Contender], *, tasks: Sequence[str | Task] = tuple(TASKS),
            batch: Sequence[int] = (1, 8), prompts: int = 8, new_tokens: int = 128, repeats: int = 5, seed: int = 0,
            draft: str | None = None, report: Report | None = None, earlier: Comparison | None = None,
            keep: Callable[[Comparison], None] | None = None) -> Comparison:
    """Runs each algorithm and plain decoding on each task and batch size.

    Every method first runs once, which compiles its programs and yields tokens and counts. Then all methods run in
    turn, `repeats` times; each repeat begins with another method. If an algorithm raises an error, its row holds the
    error, and the others continue. Ctrl-C ends the comparison and returns the rows measured so far.

    Args:
        lm: the model.
        algorithms: the algorithms by their names in the table; a function is called with the batch size and returns an
            algorithm.
        tasks: names in `decodax.bench.tasks.TASKS`, or your own tasks.
        batch: the batch sizes.
        prompts: the number of prompts at each batch size, rounded down to whole batches, but at least one batch.
        new_tokens: the maximum number of new tokens for each prompt.
        repeats: the number of timed runs of each method.
        seed: seed of the choice of prompts and of sampling.
        draft: the name of the draft model, for the record.
        report: called before each run with the number of finished runs, the number of all runs and a description.
        earlier: an earlier comparison of the same model with the same arguments. A task and batch size at which it
            measured all these methods, or found that they fail, is not measured again.
        keep: called with the comparison so far after each task and batch size.

    Raises:
        ValueError: an argument is out of range, or `earlier` has another model or other arguments; the message names
            it.
    """
    sizes = {"batch": min(batch, default=0), "prompts": prompts, "new_tokens": new_tokens, "repeats": repeats}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, takes at least 1")
    if PLAIN in algorithms:
        raise ValueError(f"algorithms: got one named {PLAIN!r}, which is the name of plain decoding")
    if unknown := [name for name in tasks if isinstance(name, str) and name not in TASKS]:
        raise ValueError(f"tasks: got {unknown[0]!r}, takes {', '.join(TASKS)}")
    chosen = [TASKS[task] if isinstance(task, str) else task for task in tasks]
    contenders: dict[str, Contender] = {PLAIN: Autoregressive(), **algorithms}
    device = jax.local_devices()[0]
    facts = {
        "model": lm.name, "bytes": sum(x.nbytes for x in jax.tree.leaves(lm.params)), "draft": draft,
        "new_tokens": new_tokens, "repeats": repeats, "seed": seed,
        "sampling": {task.name: json_ready(task.sampling) for task in chosen},
        "device": (platform.processor() or platform.machine()) if device.platform == "cpu" else device.device_kind,
        "cores": os.cpu_count(), "python": platform.python_version(), "jax": jax.__version__}
    pairs = {(task.name, size): (task, max(prompts // size, 1) * size) for task in chosen for size in batch}
    total = len(pairs) * len(contenders) * (1 + repeats)
    done: dict[tuple[str, int], list[Row]] = {}
    if earlier is not None:
        _check(earlier, facts, {pair: count for pair, (_, count) in pairs.items()}, list(contenders))
        done |= earlier.cells
    found = lambda whole: Comparison([row for pair in pairs for row in done.get(pair, ())], facts, not whole)
    for i, ((name, size), (task, count)) in enumerate(pairs.items()):
        rows = done.get((name, size), [])
        if [row.system for row in rows] == list(contenders) and all(row.speedup or row.error for row in rows):
            continue
        before = i * total // len(pairs)
        if report:
            report(before, total, f"{name}, batch {size}: prompts")
        cell = None
        try:
            cell = _Cell(lm, task, size, contenders, task.prompts(lm, count, new_tokens, seed), new_tokens, seed)
            for finished, what in cell.measure(repeats):
                if report:
                    report(before + finished, total, what)
            drop_programs(ROOM)
        except KeyboardInterrupt:
            if cell:
                done.setdefault((name, size), cell.rows())
            return found(False)
        done[name, size] = cell.rows()
        if keep:
            keep(found(i + 1 == len(pairs)))
    return found(True)


def _check(earlier: Comparison, facts: Mapping[str, Any], prompts: Mapping[tuple[str, int], int],
           systems: Sequence[str]) -> None:
    """Checks that a comparison with these facts, methods, and numbers of prompts by task and batch size can go on from
    `earlier`.

    Raises:
        ValueError: a fact is another one, or `earlier` has a task, a batch size or a method that is left out now, or
            another number of prompts; the message names it.
    """
    for name, fact in facts.items():
        before = earlier.facts[name]
        if name == "sampling":          # of the tasks of both
            before, fact = ({task: of[task] for task in before.keys() & fact.keys()} for of in (before, fact))
        if before != fact:
            raise ValueError(f"earlier: got a comparison with {name} {before!r}, this one has {fact!r}")
    for row in earlier.rows:
        if (row.task, row.batch) not in prompts or row.system not in systems:
            raise ValueError(f"earlier: got a comparison with {row.system!r} on {row.task} at batch {row.batch}, which "
                             "this one leaves out")
        if row.prompts != (count := prompts[row.task, row.batch]):
            raise ValueError(f"earlier: got a comparison with {row.prompts} prompts on {row.task} at batch "
                             f"{row.batch}, this one has {count}")


@dataclasses.dataclass
class _Cell:
    """The measurements of all methods on one task at one batch size. By name of the method, `first` holds the results
    of its first run, `seconds` the durations of its timed runs, `beside` those of plain decoding in the same repeats.
    """

    lm: LM
    task: Task
    batch: int
    contenders: Mapping[str, Contender]
    prompts: list[list[int]]
    new_tokens: int
    seed: int
    made: dict[str, Algorithm] = dataclasses.field(default_factory=dict)
    first: dict[str, list[Result]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    beside: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def measure(self, repeats: int) -> Iterator[tuple[int, str]]:
        """Runs each method once to compile it, then `repeats` times in turn. Before each run it yields the number of
        finished runs and a description.

        If the programs of all methods do not fit in memory, the methods are measured in groups, each together with
        plain decoding.
        """
        left, done = [name for name in self.contenders if name != PLAIN], 0
        where = f"{self.task.name}, batch {self.batch}"
        self.beside[PLAIN] = self.seconds.setdefault(PLAIN, [])
        while left or PLAIN not in self.first:
            group = [PLAIN]
            yield done, f"{where}: {PLAIN} (warm-up)"
            self.attempt(PLAIN)
            while left and (len(group) == 1 or not crowded(ROOM)):
                group.append(left.pop(0))
                yield done + len(group) - 1, f"{where}: {group[-1]} (warm-up)"
                self.attempt(group[-1])
            done += len(group)
            beside: list[float] = []
            self.beside |= dict.fromkeys(group[1:], beside)
            for repeat in range(1, repeats + 1):
                shift = repeat % len(group)
                for name in group[shift:] + group[:shift]:
                    yield done, f"{where}: {name}"
                    done += 1
                    if (seconds := self.attempt(name)) is None:
                        continue
                    self.seconds.setdefault(name, []).append(seconds)
                    if name == PLAIN:
                        beside.append(seconds)
            if left:
                done -= repeats + 1                     # plain decoding runs again in the next group
                drop_programs(ROOM)
        yield done, where

    def attempt(self, name: str) -> float | None:
        """Runs one method on all prompts; returns the duration of its decode loops in seconds, or None if it fails or
        has failed. Keeps the results of the first run. Errors of plain decoding are raised."""
        if name in self.errors:
            return None
        try:
            results = self.run(name)
        except Exception as error:
            if name == PLAIN:
                raise
            self.errors[name] = f"{type(error).__name__}: {error}"
            return None
        self.first.setdefault(name, results)
        return float(sum(r.stats.seconds for r in results))

    def run(self, name: str) -> list[Result]:
        """Runs one method on all prompts, `batch` at a time. A prompt gets the same random draws at every batch size.
        """
        if name not in self.made:
            given = self.contenders[name]
            self.made[name] = given(self.batch) if callable(given) else given
        algorithm = self.made[name]
        starts = range(0, len(self.prompts), self.batch)
        return [generate(self.lm, self.prompts[i:i + self.batch], max_new_tokens=self.new_tokens, algorithm=algorithm,
                         seed=self.seed, request_ids=range(i, i + self.batch), chunk=64, **self.task.sampling)
                for i in starts]

    def rows(self) -> list[Row]:
        """Returns the rows with all figures that are known so far."""
        return [self.row(name) for name in self.contenders]

    def row(self, name: str) -> Row:
        made = self.made.get(name)
        guarantee = None if made is None else "approximate" if isinstance(made, str) else made.traits.guarantee
        row = Row(self.task.name, self.batch, name, guarantee, len(self.prompts), error=self.errors.get(name))
        if name not in self.first or name in self.errors:
            return row
        new, stats = self.new(name), [r.stats for r in self.first[name]]
        total = lambda field: int(sum(np.sum(getattr(s, field)) for s in stats))
        rounds, tokens = max(total("rounds"), 1), total("tokens")
        length = 1 + total("accepted") / rounds
        row = dataclasses.replace(
            row, tokens=tokens, forwards=total("forwards"), mean_accepted_length=length,
            tokens_per_forward=tokens / rounds, accepted_by_depth=_by_depth(stats),
            copied=float(np.mean([copied(p, n) for p, n in zip(self.prompts, new, strict=True)])),
            repeated=float(np.mean([copied(p, n, own=True) for p, n in zip(self.prompts, new, strict=True)])))
        if guarantee == "seed-exact" and name != PLAIN:
            row = dataclasses.replace(row, equal=_equal(self.new(PLAIN), new))
        if not (seconds := self.seconds.get(name)):
            return row
        base = sum(map(len, self.new(PLAIN)))
        row = dataclasses.replace(row, seconds=tuple(seconds), tokens_per_second=float(tokens / np.median(seconds)))
        if not (pairs := list(zip(seconds, self.beside.get(name, []), strict=False))):
            return row                             # interrupted before plain decoding's turn
        ratios = [tokens / own / (base / plain) for own, plain in pairs]
        speedup = float(np.median(ratios))
        return dataclasses.replace(row, speedup=speedup, spread=(min(ratios), max(ratios)),
                                   overhead=length / speedup - 1)

    def new(self, name: str) -> list[list[int]]:
        """Returns the new tokens of each prompt."""
        return [r.row(i).tolist() for r in self.first[name] for i in range(len(r))]


def _equal(plain: list[list[int]], other: list[list[int]]) -> float:
    """Returns the share of positions at which both rows have the same token, relative to the longer row of each pair.
    """
    same = sum(x == y for a, b in zip(plain, other, strict=True) for x, y in zip(a, b, strict=False))
    return same / max(sum(max(len(a), len(b)) for a, b in zip(plain, other, strict=True)), 1)
