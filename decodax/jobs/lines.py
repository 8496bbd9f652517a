"""What stands in the input of a batch job, line by line: JSON lines, those of OpenAI's batches, Parquet, and datasets
as `datasets.save_to_disk` writes them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions")

RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "n": "num_samples",
           "stop": "stop", "seed": "seed", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
           "min_p": "min_p", "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
           "frequency_penalty": "frequency_penalty", "min_tokens": "min_new_tokens", "guided_regex": "regex",
           "guided_choice": "choices", "guided_json": "json_schema", "guided_grammar": "grammar"}
"""What the body of a request may ask for, in the words of OpenAI and vLLM, and what it is called here."""

IGNORED = ("model", "messages", "prompt", "user", "metadata", "store", "stream", "stream_options", "service_tier",
           "logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs")
"""What else may stand there: it is read apart, or changes nothing in a batch."""


RESULT = ("id", "custom_id", "text", "status", "prompt_tokens", "new_tokens", "tokens", "logprobs", "top_ids",
          "top_logprobs")
"""Fields of results."""


class LineError(ValueError):
    """A line that cannot be answered."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A prompt of a job.

    Attributes:
        number: of the line or row, from 1. id: what its result is known by. prompt: as `decodax.generate` takes it.
        options: of its own. keep: what goes into its result unchanged.
        api: "chat.completion" or "text_completion" where the line is a request to OpenAI's API, else None.
    """

    number: int
    id: str
    prompt: Any
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    api: str | None = None


@dataclasses.dataclass(frozen=True)
class Fields:
    """Where in a line to look.

    Attributes:
        prompt: the field of the prompt; None: `messages`, `prompt` or `text`, the first that is there. id: that of the
            id. keep: fields that go into results. chat: whether a prompt is a user's message. system: what the system
            says then, or None.
    """

    prompt: str | None = None
    id: str = "id"
    keep: Sequence[str] = ()
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if taken := [name for name in self.keep if name in RESULT]:
            raise ValueError(f"keep: got {taken[0]!r}, which results have of their own; takes other fields")

    def read(self, number: int, row: Any) -> Line:
        """The prompt of a line.

        Raises:
            LineError: it has none, or asks for something that is not here.
        """
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise LineError(f"got {type(row).__name__}, takes an object with a prompt, or a text")
        if "body" in row and "custom_id" in row:
            return self._api(number, row)
        names = (self.prompt,) if self.prompt is not None else ("messages", "prompt", "text")
        found = [name for name in names if row.get(name) is not None]
        if not found:
            raise LineError(f"has no {' or '.join(map(repr, names))}; got {', '.join(map(repr, row)) or 'nothing'}")
        options = row.get("options") or {}
        if not isinstance(options, Mapping):
            raise LineError(f"options: got {type(options).__name__}, takes an object")
        missing = [name for name in self.keep if name not in row]
        if missing:
            raise LineError(f"has no {missing[0]!r}, which was to be kept")
        for kept in self.keep:
            try:
                json.dumps(row[kept])
            except (TypeError, ValueError) as error:
                raise LineError(f"{kept}: got {row[kept]!r}, which JSON cannot hold") from error
        name = row.get(self.id)
        if isinstance(name, (dict, list)) or name == "":
            raise LineError(f"{self.id}: got {name!r}, takes a text or a number")
        return Line(number, f"line-{number}" if name is None else str(name), self._prompt(row[found[0]]), options,
                    {name: row[name] for name in self.keep})

    def _prompt(self, prompt: Any) -> Any:
        if not self.chat or not isinstance(prompt, str):
            return prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": prompt}]

    def _api(self, number: int, row: Mapping[str, Any]) -> Line:
        """A request to OpenAI's API, as batches have them in each line."""
        if self.keep:
            raise LineError(f"is a request to OpenAI's API, whose results keep no {self.keep[0]!r}")
        name, body, url = row["custom_id"], row["body"], row.get("url", URLS[0])
        if not isinstance(name, str) or not name:
            raise LineError(f"custom_id: got {name!r}, takes a text")
        if url not in URLS:
            raise LineError(f"url: got {url!r}, takes {' or '.join(URLS)}")
        if row.get("method", "POST") != "POST":
            raise LineError(f"method: got {row['method']!r}, takes 'POST'")
        if not isinstance(body, Mapping):
            raise LineError(f"body: got {type(body).__name__}, takes an object")
        chat = url == URLS[0]
        if (prompt := body.get("messages" if chat else "prompt")) is None:
            raise LineError(f"body: has no {'messages' if chat else 'prompt'!r}")
        unknown = [key for key, value in body.items() if value is not None and key not in (*RENAMED, *IGNORED)]
        if unknown:
            raise LineError(f"body: asks for {', '.join(map(repr, unknown))}, which is not here")
        if body.get("stream"):
            raise LineError("body: asks for a stream, which a batch has not")
        options = {RENAMED[key]: value for key, value in body.items() if key in RENAMED and value is not None}
        if body.get("logit_bias"):
            try:
                options["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
            except (ValueError, AttributeError) as error:
                raise LineError(f"logit_bias: got {body['logit_bias']!r}, takes biases by token ids") from error
        options.update(_language(body))
        wanted = body.get("logprobs")
        if wanted is not None and wanted is not False:
            options["logprobs"] = body.get("top_logprobs") or 0 if wanted is True else wanted
        return Line(number, name, prompt, options, api="chat.completion" if chat else "text_completion")


def _language(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the text is held to: by `response_format`, as OpenAI has it, or `structured_outputs`, as vLLM has it."""
    form, wanted = body.get("response_format"), body.get("structured_outputs")
    if wanted is not None:
        names = {"regex": "regex", "choice": "choices", "json": "json_schema", "grammar": "grammar"}
        if not isinstance(wanted, Mapping) or not wanted or wanted.keys() - names.keys():
            raise LineError(f"structured_outputs: got {wanted!r:.80}, takes {', '.join(names)}")
        return {names[key]: value for key, value in wanted.items()}
    if form is None or form == {"type": "text"}:
        return {}
    inner = form.get("json_schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise LineError(f"response_format: got {form!r:.80}, takes {{'type': 'json_schema', 'json_schema': {{'schema': "
                        "...}} or {'type': 'text'}")
    return {"json_schema": inner["schema"]}


def rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file or directory, with their numbers from 1; a row that cannot be read is a `LineError`.

    A `.parquet` file or a directory of them, a dataset's directory (`state.json`), or JSON lines; "-" is standard
    input.

    Raises:
        FileNotFoundError, ValueError: there is nothing that can be read.
    """
    if str(path) == "-":
        return _json_lines(sys.stdin.buffer)
    path = Path(path)
    if path.is_dir():
        if (path / "state.json").is_file():
            return _arrow(path)
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
            raise ValueError(f"{path}: holds the splits {', '.join(splits)}; give the directory of one of them")
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise ValueError(f"{path}: holds no dataset and no Parquet files")
        return _parquet(files)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file or directory")
    return _parquet([path]) if path.suffix == ".parquet" else _open(path)


def count(path: str | Path) -> int | None:
    """How many rows there are, if that is cheap to know."""
    if str(path) == "-":
        return None
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or directory")
    if path.is_file() and path.suffix != ".parquet":
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)
    if path.is_dir() and (path / "state.json").is_file():
        return None
    pq, files = pyarrow("parquet"), sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return sum(pq.ParquetFile(file).metadata.num_rows for file in files)


def _open(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        yield from _json_lines(file)


def _json_lines(file: Any) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            yield number, LineError(f"is no JSON in UTF-8: {error}")


def _parquet(files: Sequence[Path]) -> Iterator[tuple[int, Any]]:
    pq, number = pyarrow("parquet"), 0
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    ipc, number = pyarrow("ipc"), 0
    for entry in json.loads((path / "state.json").read_text())["_data_files"]:
        with ipc.open_stream(path / entry["filename"]) as reader:
            for batch in reader:
                for row in batch.to_pylist():
                    number += 1
                    yield number, row


def pyarrow(part: str) -> Any:
    """A part of pyarrow.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{part}")
    except ImportError as error:
        raise ValueError("Parquet and datasets take pyarrow; install decodax[jobs]") from error
