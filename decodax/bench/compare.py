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
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decodax.algorithms.plain import Autoregressive
from decodax.bench.plot import draw
from decodax.bench.tasks import TASKS, Task, copied
from decodax.core.algorithm import Algorithm
from decodax.engine.compilation import crowded, drop_programs
from decodax.engine.result import Result, Statistics, json_ready
from decodax.front.generate import generate
from decodax.io.load import LM

PLAIN = "plain"
"""The name of plain decoding among the systems."""

ROOM = 0.4
"""The share of the process's memory maps that compiled programs may hold between runs. It is lower than the share at
which every call of `generate` drops programs (`decodax.engine.compilation.keep_room`)."""

COLUMNS = ("system", "forwards", "MAT", "tokens/forward", "overhead c", "tokens/s", "speedup (spread)", "equal")

Report = Callable[[int, int, str], None]
"""A function that is called before each run with the number of finished runs, the number of all runs and a description
of the run that starts."""

Contender = Algorithm | Callable[[int], Algorithm]
"""An algorithm, or a function that makes it for a batch size."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one method on one task at one batch size. A figure is None if it was not measured, or not yet.

    Attributes:
        task: the name of the task.
        batch: the batch size.
        system: the name of the method.
        guarantee: the guarantee of the algorithm.
        prompts: the number of prompts; `batch` of them are decoded together.
        tokens: the number of new tokens over all prompts.
        forwards: the number of target forward passes of the decode loop over all prompts.
        mean_accepted_length: 1 + accepted draft tokens for each round, over all rows together, as vLLM counts it.
        tokens_per_forward: new tokens for each row and round; less than `mean_accepted_length` if the end of a text
            cuts a round short.
        accepted_by_depth: the share of rounds in which at least 1, 2, ... drafts were accepted.
        tokens_per_second: the median over the repeats; counts the decode loop only.
        seconds: the duration of each repeat.
        speedup: the median ratio of tokens per second to that of plain decoding in the same repeat.
        spread: the lowest and the highest of these ratios.
        overhead: `mean_accepted_length / speedup - 1`, by which share a round costs more than a plain step.
        equal: the share of plain decoding's tokens that the method produced at the same positions; None unless the
            guarantee is seed-exact.
        copied: the share of new tokens copied from the prompt; see `tasks.copied`.
        repeated: the share of new tokens copied from earlier output.
        error: the error with which the method failed, or None.
    """

    task: str
    batch: int
    system: str
    guarantee: str | None
    prompts: int
    tokens: int | None = None
    forwards: int | None = None
    mean_accepted_length: float | None = None
    tokens_per_forward: float | None = None
    accepted_by_depth: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    seconds: tuple[float, ...] = ()
    speedup: float | None = None
    spread: tuple[float, float] | None = None
    overhead: float | None = None
    equal: float | None = None
    copied: float | None = None
    repeated: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as a dictionary for JSON."""
        return json_ready(self)

    def cells(self) -> tuple[str, ...]:
        """Returns the row as texts, one for each of `COLUMNS`."""
        if self.error is not None:
            return self.system, "failed", *[""] * (len(COLUMNS) - 2)
        show = lambda x, form: "" if x is None else format(x, form)
        speedup = show(self.speedup, ".2f")
        if self.spread is not None and self.system != PLAIN:
            speedup += f" ({self.spread[0]:.2f} to {self.spread[1]:.2f})"
        equal = "" if self.tokens is None else "-" if self.equal is None else percent(self.equal)
        return (self.system, show(self.forwards, ","), show(self.mean_accepted_length, ".2f"),
                show(self.tokens_per_forward, ".2f"), show(self.overhead, ".2f"),
                show(self.tokens_per_second, ",.0f"), speedup, equal)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        rows: the rows, ordered by task and batch size, plain decoding first.
        facts: model, machine, versions and arguments.
        interrupted: whether Ctrl-C ended the comparison; the rows then hold the figures measured until then.
    """

    rows: list[Row]
    facts: dict[str, Any]
    interrupted: bool = False

    @property
    def cells(self) -> dict[tuple[str, int], list[Row]]:
        """The rows of each task and batch size."""
        out: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            out.setdefault((row.task, row.batch), []).append(row)
        return out

    @property
    def unequal(self) -> list[Row]:
        """Rows of seed-exact methods whose tokens differ from those of plain decoding."""
        return [row for row in self.rows if row.equal is not None and row.equal < 1]

    def json(self) -> dict[str, Any]:
        """Returns the comparison as plain data for JSON."""
        return {**self.facts, "interrupted": self.interrupted, "rows": [row.to_dict() for row in self.rows]}

    def title(self, task: str, batch: int) -> str:
        """Returns the heading of the table of a task and batch size."""
        first = self.cells[task, batch][0]
        line = f"{task}, batch {batch}: {first.prompts} prompts"
        if first.copied is None or first.repeated is None:
            return line
        return (f"{line}; of the new tokens {percent(first.copied)} are copied from the prompt, "
                f"{percent(first.repeated)} from anywhere before")

    def setting(self) -> str:
        """Returns model, lengths, machine and versions as one line."""
        f = self.facts
        draft = f" with draft {f['draft']}" if f.get("draft") else ""
        return (f"{f['model']}{draft}, {f['new_tokens']} new tokens, {f['repeats']} repeats; {f['device']}, "
                f"{f['cores']} cores; Python {f['python']}, JAX {f['jax']}")

    def markdown(self) -> str:
        """Returns the tables in Markdown."""
        parts = [self.setting() + "."]
        for (task, batch), rows in self.cells.items():
            table = ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
            table += ["| " + " | ".join(row.cells()) + " |" for row in rows]
            parts += [f"**{self.title(task, batch)}**", "\n".join(table)]
        return "\n\n".join(parts) + "\n"

    def plot(self, path: str | Path) -> None:
        """Draws the figures of all methods, see `decodax.bench.plot.draw`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        draw(path, {cell: [row for row in rows if row.system != PLAIN and row.mean_accepted_length is not None]
                    for cell, rows in self.cells.items()}, self.setting())


def _by_depth(stats: Sequence[Statistics]) -> tuple[float, ...]:
    """Returns the share of rounds in which at least 1, 2, ... drafts were accepted, up to the last that ever was."""
    shares = np.array([s.acceptance_per_position for s in stats])
    many = np.array([s.rounds.sum() for s in stats])
    return tuple(float(x) for x in np.trim_zeros(many @ shares / max(many.sum(), 1), "b"))


def compare(lm: LM, algorithms: Mapping[str, Contender], *, tasks: Sequence[str | Task] = tuple(TASKS),
            batch: Sequence[int] = (1, 8), prompts: int = 8, new_tokens: int = 128, repeats: int = 5, seed: int = 0,
            draft: str | None = None, report: Report | None = None) -> Comparison:
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

    Raises:
        ValueError: an argument is out of range; the message names it.
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
    facts = {"model": lm.name, "draft": draft, "new_tokens": new_tokens, "repeats": repeats, "seed": seed,
             "device": (platform.processor() or platform.machine()) if device.platform == "cpu" else device.device_kind,
             "cores": os.cpu_count(), "python": platform.python_version(), "jax": jax.__version__}
    pairs = [(task, size) for task in chosen for size in dict.fromkeys(batch)]
    total = len(pairs) * len(contenders) * (1 + repeats)
    cells: list[_Cell] = []
    try:
        for i, (task, size) in enumerate(pairs):
            before = i * total // len(pairs)
            if report:
                report(before, total, f"{task.name}, batch {size}: prompts")
            count = max(prompts // size, 1) * size
            cell = _Cell(lm, task, size, contenders, task.prompts(lm, count, new_tokens, seed), new_tokens, seed)
            cells.append(cell)
            for done, what in cell.measure(repeats):
                if report:
                    report(before + done, total, what)
            drop_programs(ROOM)
    except KeyboardInterrupt:
        return Comparison([row for cell in cells for row in cell.rows()], facts, interrupted=True)
    return Comparison([row for cell in cells for row in cell.rows()], facts)


def percent(share: float) -> str:
    """Returns a share as a percentage, rounded down, so that only 1.0 gives 100%.

    >>> percent(0.9999), percent(1.0), percent(0.5)
    ('99.9%', '100%', '50%')
    """
    return f"{np.floor(share * 1000) / 10:g}%"


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
