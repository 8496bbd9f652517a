"""Weights in huge pages of memory, on CPU.

A round reads every weight once, from the first to the last, and so needs the address of each page of them. In pages of
4 kB those of 500 MB are 125,000, more than a processor keeps, and looking them up takes a few hundredths of the round.
Linux gives pages of 2 MB to a program that asks for them (`madvise`, the setting of most distributions); XLA's
allocator does not ask.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import jax
import numpy as np

PAGE = 2 << 20
"""Bytes of a huge page."""

BLOCK = 64 << 20
"""Bytes that small arrays share."""

ALIGNMENT = 64
"""Bytes at whose multiples XLA takes an array as it lies in memory."""


def move(leaves: list[Any]) -> None:
    """Copies the arrays of a list to huge pages, in place, so that each one's old memory is free before the next.

    Arrays that do not lie on one CPU device stay as they are, and all of them where the system has no such pages, or
    where all of them together would not fill one.
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
    """The arrays of a tree in huge pages, as `move` copies them."""
    leaves, tree = jax.tree.flatten(params)
    move(leaves)
    return jax.tree.unflatten(tree, leaves)


def _block(size: int) -> np.ndarray:
    """`u8[n]`, memory for `size` bytes or more, from the first byte of a huge page on."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass        # a kernel without them: the copy is as good as the original
    own = np.frombuffer(memory, np.uint8)
    return own[-own.ctypes.data % PAGE:]
