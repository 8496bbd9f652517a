"""The figures of a comparison of decoding methods: its rows, tables, plot and JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from decodax.bench.plot import draw
from decodax.engine.result import json_ready

PLAIN = "plain"
"""The name of plain decoding among the systems."""

COLUMNS = ("system", "forwards", "MAT", "tokens/forward", "overhead c", "tokens/s", "speedup (spread)", "equal")

FACTS = ("model", "bytes", "draft", "new_tokens", "repeats", "seed", "sampling", "device", "cores", "python", "jax")
"""The names of the facts of a comparison. "bytes" is the size of the model's weights, "sampling" has the options of
sampling by the task."""


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

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Row:
        """Returns the row that `to_dict` made `stored` of."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in stored.items()}
        return cls(**fields)

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
        interrupted: whether figures are missing, since Ctrl-C ended the comparison or it is still running.
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

    @classmethod
    def read(cls, path: str | Path) -> Comparison:
        """Returns the comparison in a JSON file of `json` or of `decodax compare --json`.

        Raises:
            ValueError: the file is something else.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = [Row.of(row) for row in stored.pop("rows")]
            return cls(rows, {name: stored[name] for name in FACTS}, stored["interrupted"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a comparison ({error})") from error

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


def percent(share: float) -> str:
    """Returns a share as a percentage, rounded down, so that only 1.0 gives 100%.

    >>> percent(0.9999), percent(1.0), percent(0.5)
    ('99.9%', '100%', '50%')
    """
    return f"{np.floor(share * 1000) / 10:g}%"
