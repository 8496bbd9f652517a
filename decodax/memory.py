"""How large buffers are, and whether the machine can hold them: asked before anything is allocated."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from decodax.core.types import Algorithm, Model

BESIDE = 16
"""Bytes of a position beside its keys and values: token, log-probabilities, what a canvas keeps."""


def bucket(length: int) -> int:
    """The buffer size for sequences of this length: powers of two from 64 to 1,024, then multiples of 1,024.

    Programs are compiled once a size; a step costs what the rows hold, not what the buffer would.

    >>> [bucket(n) for n in (5, 65, 1000, 1025)]
    [64, 128, 1024, 2048]
    """
    return max(power(length), 64) if length <= 1024 else -(-length // 1024) * 1024


def power(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def afford(algorithm: Algorithm, model: Model, mesh: Mesh | None, rows: int, longest: int, name: str) -> None:
    """Checks that a batch of `rows` sequences of up to `longest` tokens fits the machine at all.

    What a draft model keeps and what a step computes come on top, so this refuses what is out of the question and no
    more. Errors begin with `name`, the argument that the length comes from.

    Raises:
        ValueError: it does not; says what it would take.
    """
    size = bucket(longest)
    bare: Any = algorithm.bare()
    network: Any = model
    needs = _bytes(bare, network, rows, size if algorithm.caches else 0) + rows * size * BESIDE
    has = _machine(mesh)
    if size < 1 << 30 and (has is None or needs <= has):
        return
    held = "positions are 32-bit numbers" if has is None else f"there are {_units(has)}"
    raise ValueError(
        f"{name}: {rows:,} row{'s' * (rows > 1)} of up to {longest:,} tokens take about {_units(needs)} of "
        f"memory, {held}; give a smaller max_new_tokens or max_length, fewer samples, or a batch_size")


@functools.lru_cache(maxsize=256)
def _bytes(algorithm: Any, model: Any, rows: int, capacity: int) -> int:
    """What the cache of a batch takes."""
    if not capacity:
        return 0
    cache = jax.eval_shape(lambda: algorithm.through(model).init_cache(rows, capacity))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))


def _machine(mesh: Mesh | None) -> int | None:
    """Bytes of memory that a batch may lie in; None if the machine does not tell."""
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    stats = devices[0].memory_stats() if devices[0].process_index == jax.process_index() else None
    if stats and stats.get("bytes_limit"):
        return stats["bytes_limit"] * len(devices)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):      # Windows
        return None


def _units(count: int) -> str:
    """Bytes for people.

    >>> _units(3_400_000_000_000)
    '3.4 TB'
    """
    power = min(max((len(str(count)) - 1) // 3, 0), 6)
    return f"{count / 1000 ** power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[power]}"
