"""Stores results on disk so that they survive interruptions: each is appended as soon as it is finished, and a file of
results is renamed when it is complete.

A result is one line, written with a single call to a hidden file of the current part. A process that is killed while
writing leaves an incomplete line, which the next process removes. Complete lines are not computed again, so that a job
that was killed continues where it was. Nothing else has to be written for this, and no result is lost or written twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decodax.jobs import columns
from decodax.jobs.lines import pyarrow

FORMATS = ("jsonl", "parquet")
PART, LOG, ERRORS = "part-{:03d}-{:05d}.{}", ".part-{:03d}-{:05d}.log", "_errors-{:03d}.jsonl"


def digest(name: Any) -> bytes:
    """Returns a hash of 16 bytes of a line's id, by its text: 7 and "7" have the same one."""
    return hashlib.blake2b(str(name).encode(errors="surrogatepass"), digest_size=16).digest()


@dataclasses.dataclass
class ResultStore:
    """The results of a job in a directory, as one of its processes writes them.

    Attributes:
        directory: the directory.
        identity: description of the job, which must not change while the job is unfinished; stored in `_manifest.json`.
        form: "jsonl" or "parquet".
        lines: number of lines of a part.
        process: index of this process.
        processes: number of processes.
        done: digests of the ids of all results in the directory.
    """

    directory: Path
    identity: Mapping[str, Any]
    form: str = "jsonl"
    lines: int = 10_000
    process: int = 0
    processes: int = 1
    done: set[bytes] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._log: int | None = None
        self._errors: int | None = None
        self._number = self._size = self._count = 0

    def open(self) -> None:
        """Reads the results that exist and prepares for writing.

        Raises:
            ValueError: the directory holds results of another job, or other files, or it cannot be created.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.directory}: takes a directory for results ({error.strerror})") from None
        self._manifest()
        # Lines that failed are tried again, so earlier errors are obsolete.
        for path in self.directory.glob("_errors-*.jsonl"):
            of = int(path.stem.split("-")[1])
            if of == self.process or (self.process == 0 and of >= self.processes):
                path.unlink(missing_ok=True)
        for path in sorted(self.directory.glob("part-*")):
            self.done.update(map(digest, _ids(path)))
            with contextlib.suppress(ValueError, IndexError):
                process, number = (int(x) for x in path.name.split(".")[0].split("-")[1:3])
                if process == self.process:
                    self._number = max(self._number, number + 1)
        for path in sorted(self.directory.glob(".part-*.log")):
            process, number = map(int, path.name.split(".")[1].split("-")[1:3])
            part = self.directory / PART.format(process, number, self.form)
            # Process 0 takes over the parts of processes that no longer exist.
            mine = process == self.process or (self.process == 0 and process >= self.processes)
            if part.exists():
                if mine:                        # the process was killed between renaming and deleting
                    path.unlink()
                continue
            ids, size = _whole_lines(path)
            self.done.update(map(digest, ids))
            if mine:
                os.truncate(path, size)
            if process == self.process:
                self._number, self._count, self._size = number, len(ids), size
                self._log = os.open(path, os.O_WRONLY | os.O_APPEND)
            elif mine:
                _named(path, part, len(ids))

    def _manifest(self) -> None:
        path = self.directory / "_manifest.json"
        now = {"decodax_batch": 1, "format": self.form, **self.identity}
        if not path.exists():
            others = [p.name for p in self.directory.iterdir() if not p.name.startswith((".part-", "._manifest"))]
            if others:
                raise ValueError(f"{self.directory}: holds {others[0]!r} and no _manifest.json, so it is not a job's; "
                                 "takes an empty or new directory")
            _write(path, (json.dumps(now, indent=1, sort_keys=True) + "\n").encode())
            return
        try:
            before = json.loads(path.read_text())
            assert before["decodax_batch"] == 1
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(f"{path}: takes the manifest of a batch job, got another file") from error
        now = json.loads(json.dumps(now))
        other = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if other:
            said = "; ".join(f"{key}: {json.dumps(before.get(key))} there, {json.dumps(now.get(key))} now"
                             for key in other)
            raise ValueError(f"{self.directory}: holds results of another job ({said}); takes the same model and "
                             "options, or another directory")

    @property
    def log(self) -> Path:
        """The file to which the latest results are written, until their part is full or the job ends."""
        return self.directory / LOG.format(self.process, self._number)

    def add(self, name: Any, row: Mapping[str, Any]) -> None:
        """Appends a result.

        Args:
            name: its id.
            row: its fields.

        Raises:
            OSError: the result cannot be written; no part of it is left in the file then.
        """
        if self._log is None:
            self._log, self._size, self._count = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 0, 0
        line = _line(row)
        try:
            _whole(self._log, line)
        except OSError:
            os.ftruncate(self._log, self._size)
            raise
        self._size, self._count = self._size + len(line), self._count + 1
        self.done.add(digest(name))
        if self._count >= self.lines:
            self.close()

    def fail(self, number: int, name: Any, message: str) -> None:
        """Records that a line failed.

        Args:
            number: number of the line.
            name: its id.
            message: the reason.
        """
        if self._errors is None:
            self._errors = os.open(self.directory / ERRORS.format(self.process),
                                   os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        _whole(self._errors, _line({"line": number, "id": name, "error": message}))

    def close(self) -> None:
        """Ends the current part: renames its file to the final name, or converts it to Parquet."""
        if self._log is None:
            return
        log, part = self.log, self.directory / PART.format(self.process, self._number, self.form)
        os.fsync(self._log)
        os.close(self._log)
        self._log = None
        _named(log, part, self._count)
        self._number, self._size, self._count = self._number + 1, 0, 0

    def abandon(self) -> None:
        """Closes the files without ending the part; the next process continues with them."""
        for name in ("_log", "_errors"):
            if (file := getattr(self, name)) is not None:
                os.close(file)
                setattr(self, name, None)


def _named(log: Path, part: Path, count: int) -> None:
    """Converts the log of `count` lines to a part with its final name."""
    if count == 0:
        log.unlink()
    elif part.suffix == ".jsonl":
        os.replace(log, part)
    else:
        _parquet(log, part)
        log.unlink()
    _sync(part.parent)


def _line(row: Mapping[str, Any]) -> bytes:
    """Returns a row as a line of JSON. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row) + "\n").encode()


def _whole(file: int, data: bytes) -> None:
    """Writes all of `data`, in one call if possible."""
    while data:
        data = data[os.write(file, data):]


def _whole_lines(path: Path) -> tuple[list[Any], int]:
    """Returns the ids in the complete lines of a log, and their total size in bytes."""
    ids, size = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                ids.append(_id(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                break
            size += len(line)
    return ids, size


def _ids(path: Path) -> list[Any]:
    """Returns the ids of the results in a part."""
    if path.suffix == ".parquet":
        file = pyarrow("parquet").ParquetFile(path)
        named = [name for name in ("id", "custom_id") if name in file.schema_arrow.names]
        return [_id(row) for row in file.read(columns=named).to_pylist()]
    try:
        with path.open("rb") as file:
            return [_id(json.loads(line)) for line in file]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: takes a job's results, got another line") from error


def _id(row: Mapping[str, Any]) -> Any:
    """Returns the id of a result. Answers to OpenAI's API have the id of the input in `custom_id`."""
    return row["id"] if row.get("custom_id") is None else row["custom_id"]


def _parquet(log: Path, part: Path) -> None:
    with log.open("rb") as file:
        rows = [json.loads(line) for line in file]
    unnamed = part.with_name(f".{part.name}.unnamed")
    pyarrow("parquet").write_table(columns.table(rows), unnamed)
    with unnamed.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unnamed, part)
    _sync(part.parent)


def _write(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    with unnamed.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unnamed, path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    """Makes a rename durable, if the system supports synchronising a directory."""
    with contextlib.suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
