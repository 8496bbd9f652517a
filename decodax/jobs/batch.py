"""Batch jobs: run prompts from a file through one model and write results to files, surviving interruptions."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decodax.common.arguments import positive, whole
from decodax.common.sizes import in_bytes
from decodax.core.state import Status
from decodax.engine.arrivals import Arriving
from decodax.engine.queue import Refused, Ticket, ahead_of, schedule
from decodax.engine.request import OutOfTime
from decodax.engine.result import Result
from decodax.engine.slots import Use
from decodax.front.serve import ALONE, address, given, read, settled
from decodax.io.load import LM
from decodax.jobs.lines import Fields, Line, LineError, pyarrow, rows
from decodax.jobs.sources import fields_for, with_source
from decodax.jobs.store import FORMATS, ResultStore, digest

BROKEN = "the model's logits held a NaN or an infinity"

ENDS = {Status.EOS: "stop", Status.STOP: "stop"}
"""OpenAI's reasons for the end of a text; "length" for all others."""


@dataclasses.dataclass
class JobProgress:
    """The progress of a batch job.

    Attributes:
        finished: number of lines answered by this call.
        failed: number of lines that could not be answered.
        before: number of lines that earlier calls had answered.
        tokens: number of new tokens.
        seconds: time since the call began.
        stopped: True if the call ended because its `max_time` was over.
        log: the file to which the latest results are written, until their part is full or the job ends.
        use: utilization of the slots.
    """

    finished: int = 0
    failed: int = 0
    before: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stopped: bool = False
    log: str = ""
    use: Use = dataclasses.field(default_factory=Use)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def run(lm: Any, source: str | Path, directory: str | Path, *, slots: int = 16, fields: Fields | None = None,
        form: str = "jsonl", part: int = 10_000, tokens: bool = False, process: int = 0, processes: int = 1,
        memory: str | None = None, token_budget: int | None = None, max_time: float | None = None,
        names: Mapping[str, Any] | None = None, report: Callable[[JobProgress], None] | None = None,
        **options: Any) -> JobProgress:
    """Answers every line of a file and writes the answers to a directory.

    A result is written as soon as its prompt has ended: to a hidden file of JSON lines, `.part-000-00000.log`, which
    becomes `part-000-00000.jsonl` (or `.parquet`) when the part is full or the job ends. If the job is killed and
    called again, it continues with the missing lines. No result is lost or written twice, and each is the same as
    without the interruption, since the random numbers of a line depend only on its id. Lines that cannot be answered
    are written to `_errors-000.jsonl` with their number and the reason; the next call tries them again.

    Args:
        lm: a model, as for `decodax.generate`.
        source: input of `decodax.jobs.lines.rows`: JSON lines, requests to OpenAI's API, Parquet, a dataset.
        directory: directory of the results: `part-000-00000.jsonl` and so on, and `_manifest.json`, which describes the
            model and the options.
        slots: number of prompts that run at once.
        fields: names of the fields of a line that hold its prompt, its id and so on.
        form: "jsonl" or "parquet".
        part: number of lines of a file.
        tokens: True adds token ids to the results.
        process: index of this process. The hash of a line's id determines the process that answers it (line 8 has the
            id `line-8` if it gives none). Each process writes its own files; they do not communicate.
        processes: number of processes.
        memory: memory that rows may take, such as "8GB"; see `decodax.serve`.
        token_budget: maximum number of tokens in a round; see `decodax.serve`.
        max_time: seconds after which the call stops; unfinished lines are left to the next call. (The option `max_time`
            of a single line ends its text, with the status "time".)
        names: entries of the manifest that replace options of the same name or are added to them, for options whose own
            description would be too long or not stable.
        report: called with the progress after each result.
        options: options of `decodax.generate`, for lines that do not set them.

    Returns:
        The progress made by this call.

    Raises:
        ValueError: the directory holds results of another model or with other options, or an option is out of its
            range.
        FileNotFoundError: the source does not exist.
        OSError: a result could not be written; earlier ones are kept.
        Exception: reading the source failed; the error is raised when the lines before it have been answered.
    """
    if form not in FORMATS:
        raise ValueError(f"form: got {form!r}, takes {' or '.join(FORMATS)}")
    whole("part", part, 1)
    whole("processes", processes, 1)
    whole("process", process, 0, processes - 1)
    fields = fields or Fields()
    source_rows = rows(source)
    options = given(options)
    token_budget = None if token_budget is None else whole("token_budget", token_budget, 1)
    room = None if memory is None else in_bytes(memory, "memory")
    end = None if max_time is None else time.monotonic() + positive("max_time", max_time)
    said = given({**options, **(names or {})})
    lm, options = settled(lm, options, whole("slots", slots, 1))
    fields = fields_for(lm, fields)
    named = {name: x for name, x in dataclasses.asdict(dataclasses.replace(fields, keep=tuple(fields.keep))).items()
             if x is not None or name not in ("source", "language")}      # manifests from before have neither
    identity = {"model": fingerprint(lm), "options": {key: _plain(value) for key, value in sorted(said.items())},
                "fields": named, "tokens": tokens}
    if form == "parquet":
        pyarrow("parquet")
    store = ResultStore(Path(directory), identity, form, part, process, processes)
    store.open()
    done, clock, seen = JobProgress(), time.monotonic(), set[bytes]()

    def failed(number: int, name: Any, why: str) -> None:
        store.fail(number, name, why)
        done.failed += 1

    def ticket(item: tuple[int, Any]) -> Ticket | Refused | None:
        number, row = item
        _, name = fields.name(number, row)
        key = digest(name)
        if int.from_bytes(key[-8:], "big") % processes != process:      # for another process
            return None
        try:
            line = fields.read(number, row)
            if key in seen:
                raise LineError(f"id {name!r} occurs more than once")
            seen.add(key)
            if key in store.done:
                done.before += 1
                return None
            request = read(lm, line.prompt, address(line.id), with_source(lm, fields, line, options), options)
        except OutOfTime as late:
            return Refused(late, (line, len(late.request.prompts[0])))
        except Exception as error:
            failed(number, name, reason(error))
            return None
        return Ticket(request, (line, len(request.prompts[0])))

    lines = Arriving(source_rows, ahead_of(slots, None))
    answers = schedule(lines, slots, read=ticket, end=end, memory=room, token_budget=token_budget, use=done.use)
    try:
        with contextlib.closing(answers):
            for (line, prompt_tokens), result in answers:
                if isinstance(result, Exception):
                    failed(line.number, line.id, reason(result))
                elif Status.INVALID in result.status:
                    failed(line.number, line.id, BROKEN)
                elif end is not None and Status.TIME in result.status and time.monotonic() > end:
                    done.stopped = True
                    continue
                else:
                    store.add(line.id, answer(lm, line, prompt_tokens, result, tokens))
                    done.finished += 1
                    done.tokens += int(result.lengths.sum())
                done.seconds, done.log = time.monotonic() - clock, str(store.log)
                if report is not None:
                    report(done)
        done.stopped |= not lines.exhausted
        store.close()
    except (KeyboardInterrupt, Exception):
        with contextlib.suppress(Exception):        # the first error is more informative
            store.close()
        raise
    finally:
        store.abandon()
    done.seconds, done.log = time.monotonic() - clock, ""
    return done


def reason(error: Exception) -> str:
    """Returns the text that says why a line could not be answered."""
    said = str(error).removeprefix(ALONE).encode(errors="backslashreplace").decode()
    return said if isinstance(error, (ValueError, TypeError)) and said else f"{type(error).__name__}: {said}"


def answer(lm: LM, line: Line, prompt_tokens: int, result: Result, tokens: bool) -> dict[str, Any]:
    """Returns the output line of a result, as a dictionary.

    Args:
        lm: the model.
        line: the input line.
        prompt_tokens: number of tokens of the prompt.
        result: the result of the line's prompt.
        tokens: True adds token ids.
    """
    one = lambda values: values[0] if len(result) == 1 else values
    if line.api is not None:
        return _api(lm, line, prompt_tokens, result)
    row: dict[str, Any] = {"id": line.id, **line.keep}
    if result.text is not None:
        row["text"] = one(result.text)
    row |= {"status": one([status.name.lower() for status in result.status]), "prompt_tokens": prompt_tokens,
            "new_tokens": one(result.lengths.tolist())}
    if tokens or result.text is None:
        row["tokens"] = one([result.row(i).tolist() for i in range(len(result))])
    if (noted := result.logprobs) is not None:
        row["logprobs"] = one([noted.raw[i, :n].tolist() for i, n in enumerate(result.lengths)])
        if noted.top.shape[2]:
            row["top_ids"] = one([noted.top_ids[i, :n].tolist() for i, n in enumerate(result.lengths)])
            row["top_logprobs"] = one([noted.top[i, :n].tolist() for i, n in enumerate(result.lengths)])
    return row


def _api(lm: LM, line: Line, prompt_tokens: int, result: Result) -> dict[str, Any]:
    """Returns the output line of a result in the format of OpenAI's batches."""
    assert line.api is not None
    chat, name, made = line.api == "chat.completion", digest(line.id).hex(), int(result.lengths.sum())
    choices = []
    for i, text in enumerate(result.text or [""] * len(result)):
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices.append({"index": i, **said, "logprobs": _noted(lm, result, i, chat),
                        "finish_reason": ENDS.get(result.status[i], "length")})
    body = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{name}", "object": line.api, "model": lm.name, "choices": choices,
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}}
    return {"id": f"batch_req_{name}", "custom_id": line.id,
            "response": {"status_code": 200, "request_id": name, "body": body}, "error": None}


def _noted(lm: LM, result: Result, row: int, chat: bool) -> dict[str, Any] | None:
    """Returns the log-probabilities of a row in OpenAI's format for chats or for completions; None if there are none.
    """
    if (noted := result.logprobs) is None:
        return None
    ids, chosen = result.row(row).tolist(), noted.raw[row].tolist()
    best = [[(int(token), float(p)) for token, p in zip(noted.top_ids[row, i], noted.top[row, i], strict=True)]
            for i in range(len(ids))]
    if not chat:
        named = lambda token: spelled(lm, token)[0]
        return {"tokens": [named(token) for token in ids], "token_logprobs": chosen[:len(ids)],
                "top_logprobs": [{named(token): p for token, p in top} for top in best]}

    def each(token: int, p: float) -> dict[str, Any]:
        text, data = spelled(lm, token)
        return {"token": text, "logprob": p, "bytes": data}

    return {"content": [{**each(token, p), "top_logprobs": [each(*top) for top in tops]}
                        for token, p, tops in zip(ids, chosen, best, strict=False)]}


def spelled(lm: LM, token: int) -> tuple[str, list[int]]:
    """Returns the text and the bytes of a token.

    As in OpenAI's API, the text of a token that is only part of a character lists its bytes, so that different tokens
    have different texts.
    """
    if lm.tokenizer is None:
        return str(token), list(str(token).encode())
    spelling = lm.tokenizer.pieces(skip_special_tokens=False).rest
    data = spelling[token] if token < len(spelling) else b""
    try:
        return data.decode(), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


def fingerprint(lm: LM) -> dict[str, str]:
    """Returns the name of a model and a digest of its configuration and of the beginnings and ends of its files.

    For a model that was made in memory, the digest covers the first numbers of each weight.
    """
    found = hashlib.blake2b(digest_size=16)
    if lm.directory is not None:
        for path in sorted(Path(lm.directory).iterdir()):
            if path.suffix in (".json", ".safetensors", ".jinja", ".model", ".spm"):
                size = path.stat().st_size
                found.update(f"{path.name} {size}".encode())
                with path.open("rb") as file:
                    found.update(file.read(1 << 20))
                    file.seek(max(size - (1 << 20), 0))
                    found.update(file.read())
    else:
        for where, leaf in jax.tree_util.tree_flatten_with_path(lm.params)[0]:
            found.update(f"{where} {leaf.shape} {leaf.dtype}".encode())
            found.update(np.asarray(leaf.reshape(-1)[:64]).tobytes())
    found.update(in_words(lm.model).encode())
    return {"name": str(lm.name), "digest": found.hexdigest()}


def _plain(value: Any) -> Any:
    """Converts an option to a value that JSON can represent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    said = in_words(value)
    return said if len(said) < 500 else hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def in_words(value: Any) -> str:
    """Returns a complete description of a value: dataclasses field by field, arrays by a digest, other values by `repr`
    without memory addresses, which differ between processes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.repr]
        parts = [f"{f.name}={in_words(getattr(value, f.name))}" for f in fields]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if type(value) is tuple:
        return f"({', '.join(map(in_words, value))}{',' * (len(value) == 1)})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        found = np.asarray(value)
        return f"{found.dtype}{found.shape} {hashlib.blake2b(found.tobytes(), digest_size=16).hexdigest()}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
