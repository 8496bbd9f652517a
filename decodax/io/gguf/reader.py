"""Reads the head of a GGUF file: its metadata, and the type, shape and place of each tensor.

The package `gguf` knows the types and their sizes. Its own reader makes two NumPy arrays for each token of the
vocabulary, which takes 45 seconds and 750 MB for Gemma's; this one reads arrays of numbers as a whole.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from decodax.io.files import CheckpointError

NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
"""NumPy's dtypes of the types of metadata by their numbers in files; 8 is a text and 9 an array."""

TEXT, ARRAY = 8, 9

MOST = 1 << 32
"""Largest number of entries of anything in the head, which detects broken lengths."""


def package() -> ModuleType:
    """Returns the package `gguf`.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'decodax[gguf]'") from error
    return gguf


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in a file.

    Attributes:
        name: its name.
        type: name of its type, such as "Q4_K".
        shape: its shape, the slowest axis first; the last one is that of the inputs.
        block, size: number of entries of a block, and its bytes.
        start: its first byte in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    block: int
    size: int
    start: int

    @property
    def row(self) -> int:
        """Number of bytes of a row."""
        return self.shape[-1] // self.block * self.size

    @property
    def bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row


class GgufFile:
    """A GGUF file, little-endian, of version 2 or 3.

    Attributes:
        path: the file.
        metadata: the entries of its head by key; arrays of numbers are NumPy's, those of texts are lists.
        tensors: the tensors by name.

    Raises:
        CheckpointError: it is not a whole GGUF file. The message names the entry or the tensor that is broken.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        gguf = package()
        try:
            size = self.path.stat().st_size
            with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(_Head(data, self.path), size, gguf)
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from None

    def _read(self, head: _Head, size: int, gguf: ModuleType) -> None:
        if head.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: begins with {bytes(head.data[:4])!r}, a GGUF file with b'GGUF'")
        head.at = 4
        version = head.number("u4", "the version")
        if version not in (2, 3):
            swapped = ", as in a big-endian file" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{self.path}: version: got {version}{swapped}, takes 2 or 3, little-endian")
        count, entries = head.number("u8", "the number of tensors"), head.number("u8", "the number of entries")
        self.metadata: dict[str, Any] = {}
        for i in range(entries):
            key = head.text(f"the name of entry {i} of {entries}")
            self.metadata[key] = head.value(head.number("u4", key), key)
        found = [self._tensor(head, f"tensor {i} of {count}", gguf) for i in range(count)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment: got {alignment}, takes 1 or more")
        base = -(-head.at // alignment) * alignment
        self.tensors = {tensor.name: dataclasses.replace(tensor, start=base + tensor.start) for tensor in found}
        if len(self.tensors) < len(found):
            names = [tensor.name for tensor in found]
            raise CheckpointError(f"{self.path}: holds tensor {next(n for n in names if names.count(n) > 1)} twice")
        for tensor in self.tensors.values():
            if tensor.start + tensor.bytes > size:
                raise CheckpointError(f"{self.path}: tensor {tensor.name}: takes bytes {tensor.start:,} to "
                                      f"{tensor.start + tensor.bytes:,}, but the file has {size:,}: it is cut off")

    def _tensor(self, head: _Head, what: str, gguf: ModuleType) -> GgufTensor:
        name = head.text(f"the name of {what}")
        axes = head.number("u4", f"tensor {name}")
        if axes > 8:
            raise CheckpointError(f"{self.path}: tensor {name}: got {axes} axes, takes at most 8")
        shape = tuple(head.number("u8", f"tensor {name}") for _ in range(axes))[::-1] or (1,)
        number, start = head.number("u4", f"tensor {name}"), head.number("u8", f"tensor {name}")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name}: has type {number}, which the installed package gguf "
                                  "does not know; a newer one may") from None
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if math.prod(shape) > MOST << 8:
            raise CheckpointError(f"{self.path}: tensor {name}: got shape {shape}, which no file can hold")
        if shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name}: got rows of {shape[-1]} entries, {kind.name} takes a "
                                  f"multiple of {block}")
        return GgufTensor(name, kind.name, shape, block, size, start)


class _Head:
    """Reads a file's head from front to back."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def take(self, size: int, what: str) -> bytes:
        """Returns the next bytes."""
        found = self.data[self.at:self.at + size] if size <= len(self.data) - self.at else b""
        if len(found) < size:
            raise CheckpointError(f"{self.path}: {what}: the file ends within it, after {len(self.data):,} bytes")
        self.at += size
        return found

    def number(self, dtype: str, what: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize, what), dtype)[0].item()

    def text(self, what: str) -> str:
        size = struct.unpack("<Q", self.take(8, what))[0]
        return str(self.take(size, what), "utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        """Returns the value of an entry."""
        if kind == TEXT:
            return self.text(key)
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], key)
        if kind != ARRAY:
            raise CheckpointError(f"{self.path}: {key}: has type {kind}, takes 0 to 12")
        inner, count = self.number("u4", key), self.number("u8", key)
        if count > MOST:
            raise CheckpointError(f"{self.path}: {key}: got {count:,} entries, which no file can hold")
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        return [self.value(inner, key) for _ in range(count)]
