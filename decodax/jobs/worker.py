"""A worker for Ray Data, which answers prompts in columns and returns results in columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from decodax.common.arguments import whole
from decodax.common.sizes import in_bytes
from decodax.core.state import Status
from decodax.engine.names import by_name
from decodax.engine.queue import Refused, Ticket, schedule
from decodax.engine.request import OutOfTime, Request
from decodax.front.serve import address, read, settled
from decodax.io.load import LM
from decodax.jobs.batch import BROKEN, answer, reason
from decodax.jobs.columns import of_results, table
from decodax.jobs.lines import Fields, Filled, LineError
from decodax.jobs.sources import fields_for, with_source


class Worker:
    """Answers batches of prompts, for `ray.data.Dataset.map_batches`, whose actors create one worker each.

        prompts = ray.data.read_json("prompts.jsonl")
        prompts.map_batches(Worker, fn_constructor_kwargs=dict(lm="pycode", max_new_tokens=64), batch_size=256,
                            concurrency=4, num_gpus=1).write_parquet("out")

    Each row must have an id, on which its random numbers depend. So a batch that runs twice, because an actor died or
    was too slow, gives the same results, and the division of rows into batches has no effect. Within a batch, slots are
    refilled as prompts end: use batches with several times as many rows as there are slots.

    The resulting table has the fields of the results of `decodax.jobs.run` as columns, and `error`: None, or the reason
    why a row could not be answered; its other columns except the id are then None. Every batch has the same columns of
    the same types, also if all its rows fail. Only rows with their own options `logprobs` or `num_samples` add columns.

    Args:
        lm: a model, as for `decodax.generate`; a name or a directory is loaded where the worker runs.
        slots: number of prompts that run at once.
        fields: names of the fields of a row that hold its prompt, its id and so on.
        tokens: True adds token ids to the results.
        memory: memory that rows may take, such as "8GB"; see `decodax.serve`.
        token_budget: number of tokens of a round, as in `decodax.serve`.
        options: options of `decodax.generate`, for rows that do not set them.

    Raises:
        ValueError, TypeError: as in `decodax.serve`.
    """

    def __init__(self, lm: LM | str | os.PathLike[str], *, slots: int = 16, fields: Fields | None = None,
                 tokens: bool = False, memory: str | None = None, token_budget: int | None = None, **options: Any):
        self.slots, self.tokens = whole("slots", slots, 1), tokens
        self.token_budget = None if token_budget is None else whole("token_budget", token_budget, 1)
        self.memory = None if memory is None else in_bytes(memory, "memory")
        self.lm, self.options = settled(lm, options, self.slots)
        self.fields = fields_for(self.lm, fields or Fields())
        self.many = Request.read(self.lm, [[0]], **by_name(self.options)).answers > 1

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """Returns the results of a batch, as a `pyarrow.Table` with the rows in the same order.

        Args:
            batch: a column for each field, all of the same length.
        """
        given = {name: plain(list(column), name not in self.fields.keep) for name, column in batch.items()}
        rows = [Filled(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
        found: list[dict[str, Any]] = [{} for _ in rows]

        def failed(i: int, why: str) -> None:
            field, name = self.fields.name(i + 1, rows[i])
            missing = rows[i].get(field if field == "custom_id" else self.fields.id) is None
            found[i] = {field: None if missing else name, "error": why}

        def ticket(i: int) -> Ticket | Refused | None:
            try:
                line = self.fields.read(i + 1, rows[i])
                if line.api is None and rows[i].get(self.fields.id) is None:
                    raise LineError(f"has no {self.fields.id!r}, which addresses its randomness")
                own = with_source(self.lm, self.fields, line, self.options)
                request = read(self.lm, line.prompt, address(line.id), own, self.options)
            except OutOfTime as late:
                return Refused(late, (i, line, len(late.request.prompts[0])))
            except Exception as error:
                failed(i, reason(error))
                return None
            return Ticket(request, (i, line, len(request.prompts[0])))

        answers = schedule(range(len(rows)), self.slots, read=ticket, memory=self.memory,
                           token_budget=self.token_budget)
        for (i, line, prompt_tokens), result in answers:
            if isinstance(result, Exception):
                failed(i, reason(result))
            elif Status.INVALID in result.status:
                failed(i, BROKEN)
            else:
                found[i] = {**answer(self.lm, line, prompt_tokens, result, self.tokens), "error": None}
        return table(found, self._names(given), given, self.many)

    def _names(self, given: Mapping[str, Any]) -> list[str]:
        """Returns the names of the columns that every result table has for batches with these fields."""
        api = ["id", "custom_id", "response"] if {"custom_id", "body"} <= given.keys() else []
        prompts = ("messages", "prompt", "text") if self.fields.prompt is None else (self.fields.prompt,)
        own = [] if api and given.keys().isdisjoint({*prompts, self.fields.source}) else \
            ["id", *self.fields.keep, *of_results(self.lm, self.options, self.tokens)]
        return [*api, *own, "error"]


def plain(values: list[Any], restore: bool = True) -> list[Any]:
    """Converts the values of a column to Python types, at any depth.

    Missing values, which NumPy represents as NaN, become None. With `restore`, integers that NumPy turned into floats
    because of missing values become integers again.

    >>> plain([{"n": 2.0, "stop": np.array(["a", "b"])}, {"n": float("nan"), "stop": None}])
    [{'n': 2, 'stop': ['a', 'b']}, {'n': None, 'stop': None}]
    """
    values = [x.tolist() if isinstance(x, (np.ndarray, np.generic)) else list(x) if isinstance(x, tuple) else x
              for x in values]
    missing = [x is None or (isinstance(x, float) and np.isnan(x)) for x in values]
    there = [x for x, none in zip(values, missing, strict=True) if not none]
    if restore and any(missing) and all(isinstance(x, float) and x.is_integer() for x in there):
        there = [int(x) for x in there]
    elif all(isinstance(x, Mapping) for x in there):
        names = list(dict.fromkeys(name for x in there for name in x))
        parts = {name: iter(plain([x[name] for x in there if name in x], restore)) for name in names}
        there = [{name: next(parts[name]) for name in x} for x in there]
    elif all(isinstance(x, list) for x in there):
        items = iter(plain([y for x in there for y in x], restore))
        there = [[next(items) for _ in x] for x in there]
    else:
        there = [plain([x], restore)[0] if isinstance(x, (Mapping, list)) else x for x in there]
    rest = iter(there)
    return [None if none else next(rest) for none in missing]
