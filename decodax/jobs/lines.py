"""Reads the input of batch jobs: JSON lines, requests of OpenAI's batches, Parquet, and datasets written by
`datasets.save_to_disk`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decodax.common.arguments import outside
from decodax.engine.names import NAMED, OWN
from decodax.jobs import openai
from decodax.jobs.openai import LineError
from decodax.sampling.build import DEFAULTS

RESULT = ("id", "custom_id", "text", "status", "prompt_tokens", "new_tokens", "tokens", "logprobs", "top_ids",
          "top_logprobs", "error")
"""Names of the fields of results."""


ASIDE = frozenset({"temperature", *(name for name in (*OWN, *NAMED, *DEFAULTS, *openai.RENAMED) if "_" in name)})
"""Options that are not used as names of data. A plain word, such as context or choices, may be a column of any kind."""


class Filled(dict[str, Any]):
    """A row of a table. In its structs, keys that only other rows use are present with the value None."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt of a batch job.

    Attributes:
        number: number of the line or row, from 1.
        id: identifies its result; a text or a number.
        prompt: the prompt, as for `decodax.generate`.
        options: options of `decodax.generate` for this prompt.
        keep: fields that are copied to its result.
        api: "chat.completion" or "text_completion" if the line is a request to OpenAI's API, else None.
        source: what the model's encoder reads, as the line has it; None: nothing.
    """

    number: int
    id: Any
    prompt: Any
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    api: str | None = None
    source: Any = None


@dataclasses.dataclass(frozen=True)
class Fields:
    """The names of the fields of a line, and how its prompt is read.

    Attributes:
        prompt: name of the field with the prompt; None: the first of `messages`, `prompt` and `text` that exists.
        id: name of the field with the id.
        keep: names of the fields that are copied to the result.
        chat: True if a prompt that is a text is a user's message of a chat.
        system: the system message before it, or None.
        source: name of the field with the source of an encoder-decoder: a text, token ids, or an object with `text` and
            `language`. A prompt may then be missing, and a line that is a text alone is a source. None: `source` if the
            model has an encoder that reads text.
        language: token of the language of sources that give none, as in `decodax.models.EncoderText.read`.
    """

    prompt: str | None = None
    id: str = "id"
    keep: Sequence[str] = ()
    chat: bool = False
    system: str | None = None
    source: str | None = None
    language: str | None = None

    def __post_init__(self) -> None:
        if taken := [name for name in self.keep if name in RESULT]:
            raise ValueError(f"keep: got {taken[0]!r}, which is a field of results; takes other fields")

    def name(self, number: int, row: Any) -> tuple[str, Any]:
        """Returns the name of the field that identifies the result of a line, and its value.

        The value is the line's id, or `line-` and its number if the id is missing or invalid. So each line has a value,
        also one that cannot be read.
        """
        field = "custom_id" if _is_api(row) else "id"
        name = row.get(field if field == "custom_id" else self.id) if isinstance(row, Mapping) else None
        if name is None or not _is_name(name):
            return field, f"line-{number}"
        return field, name if isinstance(name, (str, int, float)) else str(name)

    def read(self, number: int, row: Any) -> Line:
        """Returns the prompt of a line with its options.

        Raises:
            LineError: the line has no prompt, or asks for something that is not supported.
        """
        if isinstance(row, LineError):
            raise row
        if isinstance(row, str):
            row = {self.source or "prompt": row}
        if not isinstance(row, Mapping):
            raise LineError(f"got {type(row).__name__}, takes an object with a prompt, or a text")
        if _is_api(row):
            return self._api(number, row)
        names = (self.prompt,) if self.prompt is not None else ("messages", "prompt", "text")
        found = [name for name in names if row.get(name) is not None and name != self.source]
        source = None if self.source is None else _own(row, self.source)
        if not found and source is None:
            raise LineError(f"has no {' or '.join(map(repr, names))}; got {', '.join(map(repr, row)) or 'nothing'}")
        if aside := sorted(ASIDE & row.keys() - {self.id, *found[:1], self.source, *self.keep}):
            warnings.warn(f"{aside[0]}: has no effect outside of a line's options; move it into options",
                          stacklevel=outside())
        options = _own(row, "options")
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise LineError(f"options: got {type(options).__name__}, takes an object")
        missing = [name for name in self.keep if name not in row]
        if missing:
                raise LineError(f"has no {missing[0]!r}, which is to be kept")
        for kept in self.keep:
            try:
                json.dumps(row[kept], ensure_ascii=False).encode()
            except (TypeError, ValueError) as error:
                raise LineError(f"{kept}: got {row[kept]!r}, which JSON cannot hold") from error
        if (name := row.get(self.id)) is not None and not _is_name(name):
            raise LineError(f"{self.id}: got {name!r}, takes a text or a number")
        return Line(number, self.name(number, row)[1], self._prompt(_own(row, found[0])) if found else "", options,
                    {name: row[name] for name in self.keep}, source=source)

    def _prompt(self, prompt: Any) -> Any:
        if not self.chat or not isinstance(prompt, str):
            return prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": prompt}]

    def _api(self, number: int, row: Mapping[str, Any]) -> Line:
        """Returns the prompt and options of a line of OpenAI's batches."""
        if self.keep:
            raise LineError(f"keep: got {self.keep[0]!r}, takes none for requests to OpenAI's API")
        if self.system is not None:
            raise LineError("system: got a text, takes None for requests to OpenAI's API, whose messages hold it")
        name, body, url = row["custom_id"], _own(row, "body"), row.get("url")
        url = openai.URLS[0] if url is None else url
        if not isinstance(name, str) or not _is_name(name):
            raise LineError(f"custom_id: got {name!r}, takes a text")
        if url not in openai.URLS:
            raise LineError(f"url: got {url!r}, takes {' or '.join(openai.URLS)}")
        if row.get("method") not in (None, "POST"):
            raise LineError(f"method: got {row['method']!r}, takes 'POST'")
        if row.get("options"):
            raise LineError("options: got some with a body, takes the body's own options for requests to OpenAI's API")
        if not isinstance(body, Mapping):
            raise LineError(f"body: got {type(body).__name__}, takes an object")
        prompt, options = openai.read(url, body)
        return Line(number, name, prompt, options,
                    api="chat.completion" if url == openai.URLS[0] else "text_completion")


def _is_api(row: Any) -> bool:
    """True if a line is a request to OpenAI's API. In a table with such lines, other rows have the same fields with the
    value None."""
    fields = ("custom_id", "body")
    return isinstance(row, Mapping) and all(name in row for name in fields) and any(
        row[name] is not None for name in fields)


def _is_name(name: Any) -> bool:
    """True if `name` can identify a result: a text that UTF-8 can encode, a finite number, or another value with a
    `str` form."""
    if isinstance(name, str):
        return name != "" and not any("\ud800" <= c <= "\udfff" for c in name)
    return not isinstance(name, (dict, list)) and not (isinstance(name, float) and not math.isfinite(name))


def _own(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field, without keys of structs that are present only because other rows use them."""
    return _unfilled(row.get(name)) if isinstance(row, Filled) else row.get(name)


def _unfilled(value: Any) -> Any:
    """Removes the keys with the value None from the structs of a table's value; a struct with no other keys becomes
    None.

    >>> _unfilled({"n": 2, "stop": None, "response_format": {"type": None}, "user": {}})
    {'n': 2, 'user': {}}
    """
    if isinstance(value, list):
        return [_unfilled(x) for x in value]
    if not isinstance(value, Mapping):
        return value
    message = isinstance(value.get("role"), str)        # its content may be null, which templates may test
    found = {key: x for key, x in ((key, _unfilled(x)) for key, x in value.items())
             if x is not None or (message and key == "content")}
    return found if found or not value else None


def rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file or directory with their numbers, from 1; a row that cannot be read is a `LineError`.

    Args:
        path: a `.parquet` file or a directory of such files, the directory of a dataset (with `state.json`), or a file
            or pipe of JSON lines; "-" is standard input.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or directory has none of these formats.
    """
    if str(path) == "-":
        return _json_lines(_standard_input())
    path = Path(path)
    if path.is_dir():
        if (path / "state.json").is_file():
            return _arrow(path)
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
            raise ValueError(f"{path}: holds the splits {', '.join(splits)}, takes the directory of one of them")
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise ValueError(f"{path}: takes a directory with a dataset or Parquet files, got neither")
        return _parquet(files)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or directory")
    return _parquet([path]) if path.suffix == ".parquet" else _open(path)


def count(path: str | Path) -> int | None:
    """Returns the number of rows, or None if it takes long to count them or the input is standard input."""
    if str(path) == "-":
        return None
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or directory")
    if path.is_file() and path.suffix != ".parquet":
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)
    if (path.is_dir() and (path / "state.json").is_file()) or not (path.is_dir() or path.is_file()):
        return None         # a dataset, or a pipe, which can be read only once
    pq, files = pyarrow("parquet"), sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return sum(pq.ParquetFile(file).metadata.num_rows for file in files)


def _open(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        yield from _json_lines(file)


def _standard_input() -> Any:
    """Opens standard input with a separate reader.

    At exit Python closes `sys.stdin`, and aborts if a thread that reads ahead is still waiting on it.
    """
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except OSError:         # not a file
        return sys.stdin.buffer


def _json_lines(file: Any) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            yield number, LineError(f"not JSON in UTF-8: {error}")


def _parquet(files: Sequence[Path]) -> Iterator[tuple[int, Any]]:
    pq, number = pyarrow("parquet"), 0
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield number, Filled(row)


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    ipc, number = pyarrow("ipc"), 0
    for entry in json.loads((path / "state.json").read_text())["_data_files"]:
        with ipc.open_stream(path / entry["filename"]) as reader:
            for batch in reader:
                for row in batch.to_pylist():
                    number += 1
                    yield number, Filled(row)


def pyarrow(part: str) -> Any:
    """Imports a module of pyarrow, such as "parquet".

    Raises:
        ValueError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{part}")
    except ImportError as error:
        raise ValueError("Parquet and datasets take pyarrow; install decodax[jobs]") from error
