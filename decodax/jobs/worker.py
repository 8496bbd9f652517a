"""A worker of a fleet: prompts in columns to results in columns, as Ray Data hands them over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from decodax.core.state import Status
from decodax.io.load import LM
from decodax.jobs.batch import BROKEN, answer
from decodax.jobs.lines import Fields, LineError
from decodax.jobs.schedule import Ticket, schedule
from decodax.jobs.serve import read, settled
from decodax.jobs.store import table
from decodax.kvcache.selection import in_bytes
from decodax.policy.arguments import whole


class Worker:
    """Answers batches of prompts: for `ray.data.Dataset.map_batches`, whose actors make one each and keep it.

        prompts = ray.data.read_json("prompts.jsonl")
        prompts.map_batches(Worker, fn_constructor_kwargs=dict(lm="pycode", max_new_tokens=64), batch_size=256,
                            concurrency=4, num_gpus=1).write_parquet("out")

    Randomness is addressed by the id of a row, which each must have. So a batch that is run twice, since an actor died
    or was too slow, has the same results both times, however rows are divided. The places of a worker are filled again
    as prompts end, within a batch: take batches of several times as many rows as there are places.

    A table has the columns that results of `decodax.jobs.run` have as fields, and `error`: None, or why a row could not
    be answered; all else but its id is then None.

    Args:
        lm: as `decodax.generate` takes it; a name or a directory is loaded where the worker runs.
        slots: prompts at once. fields: where in a row to look. tokens: whether results have token ids, too.
        memory, token_budget: as of `decodax.serve`.
        options: of `decodax.generate`, for rows that do not say otherwise.

    Raises:
        ValueError, TypeError: as `decodax.serve`.
    """

    def __init__(self, lm: LM | str | os.PathLike[str], *, slots: int = 16, fields: Fields | None = None,
                 tokens: bool = False, memory: str | None = None, token_budget: int | None = None, **options: Any):
        self.slots, self.fields, self.tokens = whole("slots", slots, 1), fields or Fields(), tokens
        self.token_budget = None if token_budget is None else whole("token_budget", token_budget, 1)
        self.memory = None if memory is None else in_bytes(memory, "memory")
        self.lm, self.options = settled(lm, {name: x for name, x in options.items() if x is not None}, self.slots)

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """The results of a batch, a `pyarrow.Table` in its order.

        Args:
            batch: a column for each field, all of the same length.
        """
        columns = {name: _plain(column) for name, column in batch.items()}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        found: list[dict[str, Any]] = [{} for _ in rows]

        def failed(i: int, error: object) -> None:
            key, name = _name(rows[i], self.fields)
            found[i] = {key: None if name is None else str(name), "error": str(error)}

        def tickets() -> Iterator[Ticket]:
            for i, row in enumerate(rows):
                try:
                    if _name(row, self.fields)[1] is None:
                        raise LineError(f"has no {self.fields.id!r}, by which its randomness is addressed")
                    line = self.fields.read(i + 1, row)
                    asked = {"prompt": line.prompt, "id": line.id, **line.options}
                    _, request = read(self.lm, asked, 0, self.options)
                except (ValueError, TypeError) as error:
                    failed(i, str(error).removeprefix("prompts[0]: "))
                else:
                    yield Ticket(request, (i, line, len(request.prompts[0])))

        answers = schedule(tickets(), self.slots, memory=self.memory, token_budget=self.token_budget)
        for (i, line, prompt_tokens), result in answers:
            if Status.INVALID in result.status:
                failed(i, BROKEN)
            else:
                found[i] = {**answer(self.lm, line, prompt_tokens, result, self.tokens), "error": None}
        return table(found)


def _name(row: Mapping[str, Any], fields: Fields) -> tuple[str, Any]:
    """The field by which the result of a row is known, and what stands in it."""
    return ("custom_id", row["custom_id"]) if "custom_id" in row else ("id", row.get(fields.id))


def _plain(column: Any) -> list[Any]:
    """The values of a column without NumPy's types; those that are not there are None."""
    value = lambda x: x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x
    return [None if isinstance(x, float) and np.isnan(x) else value(x) for x in column]
