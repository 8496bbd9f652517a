"""Converts results to Arrow columns whose types do not depend on the results.

Programs that read a folder of Parquet files use the columns of the first file for all of them. So a file in which every
row failed must have the same columns and types as the others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from decodax.jobs.lines import pyarrow

SAMPLED = ("text", "status", "new_tokens", "tokens", "logprobs", "top_ids", "top_logprobs")
"""Columns that hold a list with one entry per sample if a prompt has several samples."""


def table(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = (),
          given: Mapping[str, Sequence[Any]] | None = None, many: bool = False) -> Any:
    """Returns results as a `pyarrow.Table`.

    Args:
        rows: the results.
        names: columns that always exist; other fields of the rows come after them.
        given: the values of the copied input fields in all rows, which determine their type if no result has a value.
        many: True if prompts have several samples by default, so that the fields of a result are lists.
    """
    pa = pyarrow("lib")
    return pa.table({name: _column(pa, name, [row.get(name) for row in rows], (given or {}).get(name), many)
                     for name in dict.fromkeys([*names, *(name for row in rows for name in row)])})


def of_results(lm: Any, options: Mapping[str, Any], tokens: bool) -> list[str]:
    """Returns the names of the columns of results, without copied input fields, for rows without options of their own.
    """
    logprobs = options.get("logprobs")
    return [*([] if lm.tokenizer is None else ["text"]), "status", "prompt_tokens", "new_tokens",
            *(["tokens"] if tokens or lm.tokenizer is None else []), *([] if logprobs is None else ["logprobs"]),
            *(["top_ids", "top_logprobs"] if logprobs else [])]


def _column(pa: Any, name: str, values: list[Any], given: Sequence[Any] | None, many: bool) -> Any:
    """Returns the column `name`. If its values have no common type, it holds text: ids by `str`, other values as JSON.
    """
    own = _types(pa).get(name)
    if name == "id" and len({type(x) for x in values if x is not None}) != 1:
        own = pa.string()
        values = [None if x is None else str(x) for x in values]
    if own is not None:
        kinds = [own, pa.list_(own)]
        for kind in reversed(kinds) if many and name in SAMPLED else kinds:
            # Arrow accepts a string as a list of its letters.
            if kind != pa.list_(pa.string()) or all(isinstance(x, list) for x in values if x is not None):
                with contextlib.suppress(pa.ArrowException, TypeError, ValueError):
                    return pa.array(values, kind)
    else:
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            kind = pa.array([x for x in [*(given or ()), *values] if x is not None]).type
            if _written(pa, kind):
                return pa.array(values, kind)
    spell = str if name == "id" else json.dumps
    return pa.array([None if x is None else spell(x) for x in values], pa.string())


def _written(pa: Any, kind: Any) -> bool:
    """True if Parquet supports the type; it does not support structs without fields."""
    if isinstance(kind, pa.StructType) and kind.num_fields == 0:
        return False
    return all(_written(pa, kind.field(i).type) for i in range(kind.num_fields))


def _types(pa: Any) -> dict[str, Any]:
    """Returns the types of the fields of results, including the answers of both of OpenAI's APIs."""
    text, number, real, many = pa.string(), pa.int64(), pa.float64(), pa.list_
    noted = {"token": text, "logprob": real, "bytes": many(number)}
    struct = lambda **fields: pa.struct(list(fields.items()))
    logprobs = struct(content=many(struct(**noted, top_logprobs=many(struct(**noted)))), tokens=many(text),
                      token_logprobs=many(real), top_logprobs=many(pa.map_(text, real)))
    choice = struct(index=number, message=struct(role=text, content=text), text=text, logprobs=logprobs,
                    finish_reason=text)
    usage = struct(prompt_tokens=number, completion_tokens=number, total_tokens=number)
    body = struct(id=text, object=text, model=text, choices=many(choice), usage=usage)
    return {"custom_id": text, "text": text, "status": text, "error": text, "prompt_tokens": number,
            "new_tokens": number, "tokens": many(number), "logprobs": many(real), "top_ids": many(many(number)),
            "top_logprobs": many(many(real)),
            "response": struct(status_code=number, request_id=text, body=body)}
