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

PAGE = 2 << 20
"""Bytes of a huge page."""

BLOCK = 64 << 20
"""Size in bytes of the blocks that small arrays share."""

ALIGNMENT = 64
"""Alignment in bytes at which XLA uses an array's memory without copying it."""


def move(leaves: list[Any]) -> None:
    """Copies the arrays in a list to huge pages and replaces them in the list. The memory of each array is freed before
    the next one is copied.

    Arrays that are not on one CPU device are not moved. No array is moved if the system has no huge pages, or if all
    arrays together are smaller than one page.
    """
    if not sys.platform.startswith("linux"):
        return
    here = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and x.size
            and [device.platform for device in x.devices()] == ["cpu"]]
    left = sum(np.asarray(leaves[i]).nbytes for i in here)
    if left < PAGE:
        return
    block, at = np.empty(0, np.uint8), 0
    for i in here:
        old = np.asarray(leaves[i])
        size = old.nbytes
        if size > len(block) - at:
            block, at = _block(max(min(left, BLOCK), size)), 0
        new = block[at:at + size].view(old.dtype).reshape(old.shape)
        np.copyto(new, old)
        left, at = left - size, at + -(-size // ALIGNMENT) * ALIGNMENT
        leaves[i] = jax.device_put(new, next(iter(leaves[i].devices())))


def moved(params: Any) -> Any:
    """Returns a pytree with its arrays in huge pages. The memory of the original arrays is freed if nothing else refers
    to them; see `move`."""
    leaves, tree = jax.tree.flatten(params)
    move(leaves)
    return jax.tree.unflatten(tree, leaves)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array that is not filled yet, in huge pages if it fills one. JAX uses its memory without a copy."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if sys.platform.startswith("linux") and size >= PAGE:
        return _block(size)[:size].view(kind).reshape(shape)
    own = np.empty(size + ALIGNMENT, np.uint8)
    start = -own.ctypes.data % ALIGNMENT
    return own[start:start + size].view(kind).reshape(shape)


def _block(size: int) -> np.ndarray:
    """Returns memory for at least `size` bytes, `u8[n]`, aligned to a huge page."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass        # a kernel without huge pages: the copy is as good as the original
    own = np.frombuffer(memory, np.uint8)
    return own[-own.ctypes.data % PAGE:]
