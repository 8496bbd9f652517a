"""Reads weights from safetensors files straight to the memory where they stay.

Some rows of a tensor are mapped at a time, so the pages of a file hardly count as memory of the process, and several
threads copy them: NumPy lets other threads run meanwhile. A kernel is transposed in tiles that fit a processor's cache.
A large tensor that a CPU can use as the file has it is not copied: its pages are read when they are first used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import jax.numpy as jnp
import numpy as np

from decodax.io import huge_pages
from decodax.io.files import ALIGNMENT, DTYPES, CheckpointError, Files
from decodax.models.weight_source import WeightSource, shape_of

CHUNK = 1 << 20
"""Number of entries that a thread copies at a time."""

TILE = 256
"""Rows and columns of a tile. A thread transposes 0.8 to 1.3 billion 16-bit entries a second this way, and 0.03 without
tiles."""

MAPPED = 1 << 20
"""Smallest size in bytes of a tensor that stays in the file. Others are copied, which takes no time, so that a small
model does not depend on what happens to its file."""

THREADS = 8
"""Maximum number of threads; more of them do not read memory faster."""

Bounds = tuple[tuple[int, int], ...]
"""A pair of start and end for each axis."""

Index = tuple[slice | np.ndarray, ...]
"""An index of an array: a slice for each axis, or ascending indices for at most one of them."""

Copies = Iterator[Callable[[], None]]
"""Functions that each copy a part. They may run side by side."""


class ArrayReader:
    """Reads weights, or parts of them, from the files of a directory.

    Attributes:
        files: the files.
    """

    def __init__(self, files: Files):
        self.files = files
        self._open: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, THREADS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._pool.shutdown()
        for file in self._open.values():
            os.close(file)
        self._open.clear()
        self._maps.clear()      # each is unmapped with the last array that refers to it

    def read(self, source: WeightSource, bounds: Bounds, dtype: np.dtype, blocks: huge_pages.HugeBlocks | None = None,
             turned: bool = False) -> np.ndarray:
        """Returns the part of a weight within `bounds`.

        Args:
            source: the tensors that make up the weight.
            bounds: the part.
            dtype: the dtype to which it is cast.
            blocks: where the array lies, if it does not stay in the file; None: in memory of its own.
            turned: True exchanges the last two axes of the array, as packed kernels have them, `[..., N, K]`.
        """
        shape = tuple(stop - start for start, stop in bounds)
        if blocks is not None and (found := self._mapped(source, shape, dtype, turned)) is not None:
            return blocks.keep(found)
        make = huge_pages.empty if blocks is None else blocks.empty
        found = make((*shape[:-2], *shape[:-3:-1]) if turned else shape, dtype)
        goal = np.swapaxes(found, -1, -2) if turned else found
        jobs: Copies
        if len(bounds) > len(source.full):
            jobs = itertools.chain.from_iterable(
                self._weight(name, source, bounds[1:], goal[i])
                for i, name in enumerate(source.tensors[slice(*bounds[0])]))
        elif source.joined:
            jobs = itertools.chain.from_iterable(self._shards(source, bounds, goal))
        else:
            jobs = self._weight(source.tensors[0], source, bounds, goal)
        if found.size <= CHUNK // 8:       # a thread costs more
            for job in jobs:
                job()
        else:
            for _ in self._pool.map(lambda job: job(), jobs):
                pass
        if source.ids and found.size and not ((found >= 0) & (found < source.ids)).all():
            raise CheckpointError(f"{self.files.home[source.tensors[0]]}: tensor {source.tensors[0]}: got numbers from "
                                  f"{found.min():g} to {found.max():g}, takes 0 to {source.ids - 1}")
        return found

    def _mapped(self, source: WeightSource, shape: tuple[int, ...], dtype: np.dtype, turned: bool) -> np.ndarray | None:
        """Returns a weight where the file is mapped, if JAX can use it there without a copy; else None."""
        name, turns = source.tensors[0], source.transpose
        if (len(source.tensors) > 1 or source.part is not None or turns != turned or shape != shape_of(source)
                or (turns and len(shape) > 2) or os.name != "posix"):       # Windows could not replace the file
            return None
        start, count = self.files.start(name), math.prod(shape)
        if self._dtype(name) != dtype or count * dtype.itemsize < MAPPED or start % ALIGNMENT:
            return None
        path = self.files.home[name]
        if path not in self._maps:
            # A program to which an array is donated may write to it: to copies of the pages, not to the file.
            self._maps[path] = mmap.mmap(self._file(path), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(self._maps[path], dtype, count, start).reshape(source.full)

    def _dtype(self, name: str) -> np.dtype:
        return np.dtype(jnp.dtype(DTYPES[str(self.files.slice(name).get_dtype())]))

    def _file(self, path: Path) -> int:
        """Returns the descriptor of a file, which is opened once."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def _shards(self, source: WeightSource, bounds: Bounds, goal: np.ndarray) -> Iterator[Copies]:
        """Returns the copies that make up a weight of tensors that are joined along their first axis."""
        (first, last), *rest = bounds
        for i, (name, shape) in enumerate(source.shapes.items()):
            start = i * source.joined
            low, high = max(first, start), min(last, start + shape[0])
            if low < high:
                own = dataclasses.replace(source, tensors=(name,), full=shape, joined=0)
                yield self._weight(name, own, ((low - start, high - start), *rest), goal[low - first:high - first])

    def _weight(self, name: str, source: WeightSource, bounds: Bounds, goal: np.ndarray) -> Copies:
        """Returns the copies that make up a weight of one tensor."""
        # Axes of length 1 that the weight does not have.
        extra, after = len(source.full) - len(bounds) - source.after, source.after
        index: Index = (*[slice(0, 1)] * extra, *(slice(*b) for b in bounds), *[slice(0, 1)] * after)
        if source.part is not None:
            chosen = source.part.indices(*bounds[-1])
            first, last = (int(chosen[0]), int(chosen[-1]) + 1) if len(chosen) else (0, 0)
            index = (*index[:-1], slice(first, last) if last - first == len(chosen) else chosen)
        place = _Entries(self._file(self.files.home[name]), self.files.start(name), self._dtype(name), source.full)
        return place.copies(source.turned(index), source.turned(goal[(*[None] * extra, ..., *[None] * after)]))


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Consecutive entries of a file.

    Attributes:
        file: descriptor of the file.
        start: offset in bytes of the first one.
        dtype, shape: their dtype and shape.
    """

    file: int
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def rows(self, first: int, *shape: int) -> _Entries:
        """Returns the entries from a row on, with another shape."""
        return _Entries(self.file, self.start + first * math.prod(self.shape[1:]) * self.dtype.itemsize, self.dtype,
                        shape)

    def copies(self, index: Index, goal: np.ndarray) -> Copies:
        """Returns the copies of what `index` takes to `goal`."""
        if goal.size == 0:
            return
        if math.prod(self.shape) <= CHUNK or len(self.shape) < 2:
            yield functools.partial(self._copy, index, goal)
            return
        _, *rest = self.shape
        rows = np.arange(self.shape[0])[index[0]]
        step = CHUNK // math.prod(rest)
        if len(rest) > 1 and not step:
            for i, row in enumerate(rows.tolist()):
                yield from self.rows(row, *rest).copies(index[1:], goal[i])
            return
        step = max(step, 1)
        for i in range(0, len(rows), step):
            own = rows[i:i + step]
            first, count = int(own[0]), int(own[-1]) + 1 - int(own[0])
            taken = slice(None) if count == len(own) else own - first
            yield functools.partial(self.rows(first, count, *rest)._copy, (taken, *index[1:]), goal[i:i + step])

    def _copy(self, index: Index, goal: np.ndarray) -> None:
        before, count = self.start % mmap.ALLOCATIONGRANULARITY, math.prod(self.shape)
        mapped = mmap.mmap(self.file, before + count * self.dtype.itemsize, access=mmap.ACCESS_READ,
                           offset=self.start - before)      # unmapped with the last array that refers to it
        bits = np.frombuffer(mapped, bits_of(self.dtype), count, before).reshape(self.shape)
        copy(bits[(*index, ...)].view(self.dtype), goal)


def bits_of(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of unsigned integers of the same size. NumPy copies them without the interpreter's lock, and
    bfloat16 with it."""
    return np.dtype(f"u{dtype.itemsize}")


def copy(values: np.ndarray, goal: np.ndarray) -> None:
    """Casts the array `values` to the dtype of `goal` and copies it there; both have one shape. A transposed array is
    copied in tiles, which is faster."""
    if goal.ndim < 2 or goal.strides[-1] == goal.itemsize or goal.shape[-1] == 1:
        cast(values, goal)
        return
    if goal.ndim > 2:
        for own, to in zip(values, goal, strict=True):
            copy(own, to)
        return
    # Rows at a distance of a power of two would share a few lines of the cache.
    tile, bits = np.empty((TILE, TILE + 16), goal.dtype), goal.view(bits_of(goal.dtype))
    for i in range(0, goal.shape[0], TILE):
        for j in range(0, goal.shape[1], TILE):
            part = values[i:i + TILE, j:j + TILE]
            own = tile[:part.shape[0], :part.shape[1]]
            cast(part, own)
            bits[i:i + TILE, j:j + TILE] = own.view(bits.dtype)


def cast(values: np.ndarray, goal: np.ndarray) -> None:
    """Writes `values` into `goal`, an array of the same shape, converted to its dtype."""
    if values.dtype == goal.dtype:
        bits = bits_of(goal.dtype)
        np.copyto(goal.view(bits), values.view(bits))
    elif values.dtype == jnp.bfloat16 and goal.dtype == np.float32:
        np.left_shift(values.view(np.uint16), 16, out=goal.view(np.uint32), dtype=np.uint32)
    else:
        goal[...] = values
