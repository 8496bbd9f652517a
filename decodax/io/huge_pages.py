"""Moves weights to huge memory pages, on CPU.

A decoding step reads every weight once and has to look up the address of each memory page. 500 MB are 125,000 pages of
4 kB, more than a processor caches, and the lookups take a few hundredths of the step. Linux gives pages of 2 MB to a
program that asks for them (`madvise`, the setting of most distributions); XLA's allocator does not ask.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import jax
import numpy as np

from decodax.io.files import ALIGNMENT

PAGE = 2 << 20
"""Bytes of a huge page."""

BLOCK = 64 << 20
"""Size in bytes of the blocks that small arrays share."""


class HugeBlocks:
    """Memory for arrays side by side in huge pages. JAX uses it without a copy on CPU.

    Attributes:
        left: bytes that are still to come. If it is less than a page at first, or the system has no huge pages, each
            array has memory of its own.
    """

    def __init__(self, left: int):
        self.left = left
        self._huge = _fills(left)
        self._block, self._at = np.empty(0, np.uint8), 0
        self._ranges: list[range] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an uninitialized array in huge pages, next to those already there; in memory of its own if there are
        no huge pages."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if not self._huge:
            return _aligned(size).view(kind).reshape(shape)
        if size > len(self._block) - self._at:
            self._block, self._at = _block(max(min(self.left, BLOCK), size)), 0
            self._ranges.append(range(start := self._block.ctypes.data, start + len(self._block)))
        found = self._block[self._at:self._at + size].view(kind).reshape(shape)
        self.left, self._at = self.left - size, self._at + -(-size // ALIGNMENT) * ALIGNMENT
        return found

    def keep(self, own: np.ndarray) -> np.ndarray:
        """Marks an array, whose memory is elsewhere, as one that `moved` must not copy into the blocks; returns it."""
        self._ranges.append(range(start := own.ctypes.data, start + own.nbytes))
        self.left -= own.nbytes
        return own

    def moved(self, params: Any) -> Any:
        """Returns a pytree whose arrays on one CPU device are copied into these blocks, unless they lie there already
        or are marked by `keep`; other arrays are returned as they are."""
        return jax.tree.map(lambda x: self._moved(x) if self._huge and on_cpu(x) else x, params)

    def _moved(self, x: jax.Array) -> jax.Array:
        if any(x.unsafe_buffer_pointer() in own for own in self._ranges):
            return x
        old = np.asarray(x)
        new = self.empty(old.shape, old.dtype)
        np.copyto(new, old)
        return jax.device_put(new, next(iter(x.devices())))


def on_cpu(x: Any) -> bool:
    """Returns True for an array with entries on one CPU device."""
    return isinstance(x, jax.Array) and x.size > 0 and [device.platform for device in x.devices()] == ["cpu"]


def move(leaves: list[Any]) -> None:
    """Copies the arrays in a list to huge pages and replaces them in the list. The memory of each array is freed before
    the next one is copied.

    Arrays that are not on one CPU device are not moved. No array is moved if the system has no huge pages, or if all
    arrays together are smaller than one page.
    """
    blocks = HugeBlocks(sum(np.asarray(x).nbytes for x in leaves if on_cpu(x)))
    for i in range(len(leaves)):
        leaves[i] = blocks.moved(leaves[i])


def moved(params: Any) -> Any:
    """Returns a pytree with its arrays in huge pages. The memory of the original arrays is freed if nothing else refers
    to them; see `move`."""
    leaves, tree = jax.tree.flatten(params)
    move(leaves)
    return jax.tree.unflatten(tree, leaves)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array that is not filled yet, in huge pages if it fills one. JAX uses its memory without a copy.

    What does not fill a huge page is in small ones: a huge page takes all its memory with the first byte, so an array
    of 5.5 MB would hold 6 MB.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    own = _block(size, size // PAGE * PAGE) if _fills(size) else _aligned(size)
    return own[:size].view(dtype).reshape(shape)


def _fills(size: int) -> bool:
    """Returns True if the system has huge pages, and `size` bytes fill one."""
    return sys.platform.startswith("linux") and size >= PAGE


def _aligned(size: int) -> np.ndarray:
    """Returns `size` bytes of plain memory, `u8[size]`."""
    own = np.empty(size + ALIGNMENT, np.uint8)
    start = -own.ctypes.data % ALIGNMENT
    return own[start:start + size]


def _block(size: int, huge: int | None = None) -> np.ndarray:
    """Returns memory for at least `size` bytes, `u8[n]`, aligned to a huge page. The first `huge` bytes, a multiple of
    a page, are in huge pages and the rest is in small ones; None: all are in huge pages."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own = np.frombuffer(memory, np.uint8)
    start = -own.ctypes.data % PAGE
    end = len(own) if huge is None else start + huge
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
        if end < len(own):
            memory.madvise(mmap.MADV_NOHUGEPAGE, end, len(own) - end)
    except OSError:
        pass        # a kernel without huge pages: the copy is as good as the original
    return own[start:]
