"""Reads parts of tensors from safetensors files, in any of their dtypes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import jax.numpy as jnp
import numpy as np

from decodax.io.files import DTYPES, CheckpointError, Files


class TensorReader:
    """Reads tensors of a directory's safetensors files, some rows at a time.

    It reads instead of mapping the files, whose pages would count as memory of the process, and it knows dtypes that
    NumPy lacks.

    Attributes:
        files: the files.
    """

    def __init__(self, files: Files):
        self.files = files
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def __contains__(self, name: object) -> bool:
        return name in self.files.home

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the dtype by its name in safetensors, such as "F8_E4M3"."""
        return str(self.files.slice(name).get_dtype())

    def where(self, name: str) -> str:
        """Returns the file and the name of a tensor, for errors."""
        return f"{self.files.home[name]}: tensor {name}"

    def require(self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> str:
        """Checks that a tensor exists and has one of the shapes and dtypes. Returns its name.

        Raises:
            CheckpointError: it does not; the message names the file, the tensor, and what it takes.
        """
        if name not in self:
            raise CheckpointError(f"{self.files.name}: lacks tensor {name}, which its quantization requires")
        if self.shape(name) not in shapes:
            raise CheckpointError(f"{self.where(name)}: has shape {self.shape(name)}, takes "
                                  f"{' or '.join(map(str, dict.fromkeys(shapes)))}")
        if self.dtype(name) not in dtypes:
            raise CheckpointError(f"{self.where(name)}: got {self.dtype(name)}, takes {', '.join(dtypes)}")
        return name

    def whole(self, name: str) -> np.ndarray:
        """Returns a tensor."""
        return self._read(name, 0, math.prod(self.shape(name))).reshape(self.shape(name))

    def rows(self, name: str, which: np.ndarray) -> np.ndarray:
        """Returns the rows of a tensor at ascending indices of its first axis."""
        first, last, rest = int(which[0]), int(which[-1]) + 1, self.shape(name)[1:]
        size = math.prod(rest)
        found = self._read(name, first * size, last * size).reshape(last - first, *rest)
        return found if len(which) == last - first else found[which - first]

    def equal(self, name: str, other: str) -> bool:
        """Returns True if two tensors have the same shape and entries; some rows are read at a time."""
        rows = self.shape(name)[0]
        parts = (np.arange(start, min(start + 4096, rows)) for start in range(0, rows, 4096))
        return self.shape(name) == self.shape(other) and all(
            np.array_equal(self.rows(name, part), self.rows(other, part)) for part in parts)

    def flat(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns the entries of a tensor from `start` to `stop`, in the order of the file."""
        return self._read(name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        path = self.files.home[name]
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        file, stored = self._open[path], self.dtype(name)
        if stored not in DTYPES:
            raise CheckpointError(f"{self.where(name)}: got {stored}, takes {', '.join(DTYPES)}")
        dtype = np.dtype(jnp.dtype(DTYPES[stored]))
        at, size = self.files.start(name) + start * dtype.itemsize, (stop - start) * dtype.itemsize
        found, done = np.empty(size, np.uint8), 0
        while done < size:
            more = os.preadv(file, [found.data[done:]], at + done)
            if not more:
                raise CheckpointError(f"{self.where(name)}: the file ends within it")
            done += more
        return found.view(dtype)
