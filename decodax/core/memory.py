"""How large buffers and batches are made, and whether the machine can hold them: asked before anything is allocated."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from decodax.common.axes import DATA
from decodax.core.cache import Cache
from decodax.core.capabilities import PromptPhase
from decodax.core.checks import instance
from decodax.core.types import Algorithm, Model

BESIDE = 16
"""Bytes of a position beside its keys and values: token, log-probabilities, what a canvas keeps."""


SPARE = 256 << 20
"""Bytes of cache that rows which fill up a batch may take."""

NARROW = {"cpu": 8, "other": 256}
"""Tokens of a round up to which reading the weights is most of its cost, by platform."""


def bucket(length: int) -> int:
    """The buffer size for sequences of this length: powers of two from 256 to 1,024, then multiples of 1,024.

    Programs are compiled once a size; a step costs what the rows hold, not what the buffer would.

    >>> [bucket(n) for n in (5, 257, 1000, 1025)]
    [256, 512, 1024, 2048]
    """
    return max(power(length), 256) if length <= 1024 else -(-length // 1024) * 1024


def batch(algorithm: Algorithm, model: Model, mesh: Mesh | None, rows: int, size: int) -> int:
    """How many rows the programs for a batch of `rows` have; those beyond are finished from the start.

    Programs are compiled once a number of rows, so 2 to 8 rows run as 8 and more as a multiple of 8, where the rows
    that fill up cost little: where their cache is within `SPARE`, and the round's tokens, all rows counted, are within
    `NARROW` or a quarter more than without them. Otherwise the number is rounded up by steps of an eighth of the next
    power of two. Where rows share memory (`Layout.by_row`) none are added. One row stays one: on a busy 2-core CPU a
    step of a 125M shape takes 40 ms with one row, 51 with 4 and 65 with 8, one of `pycode` 2.0 with one, 4.1 with two
    and 7.3 with 8. A mesh gets a multiple of its data axis in any case.

    >>> from decodax import Autoregressive
    >>> from decodax.models import Transformer, llama
    >>> model = Transformer(llama(vocab=32, width=16, layers=1, heads=2, kv_heads=1, mlp=24, context=256))
    >>> [batch(Autoregressive(), model, None, n, 256) for n in (1, 2, 5, 8, 9, 20, 100)]
    [1, 8, 8, 8, 10, 24, 112]

    Args:
        size: slots of a row's buffer.
    """
    bare: Any = algorithm.bare()
    network: Any = model
    row = _bytes(bare, network, 1, size if algorithm.caches else 0)
    narrow = NARROW["cpu" if jax.default_backend() == "cpu" else "other"]
    octave, many = power(rows) // 8, rows
    if rows > 1 and _cache(bare, network, 1, size if algorithm.caches else 0).layout.by_row:
        coarse, fine = (-(-rows // step) * step for step in (max(octave, 8), max(octave, 1)))
        cheap = coarse * algorithm.emits <= narrow or 4 * coarse <= 5 * rows
        many = coarse if cheap and (coarse - rows) * row <= SPARE else fine if (fine - rows) * row <= SPARE else rows
    parts = 1 if mesh is None else mesh.shape.get(DATA, 1)
    return -(-many // parts) * parts


def by_row(algorithm: Algorithm, model: Model) -> bool:
    """Whether rows of the method's cache can stand in for one another; see `Layout.by_row`."""
    bare: Any = algorithm.bare()
    network: Any = model
    return not algorithm.caches or _cache(bare, network, 1, 256).layout.by_row


def grows(algorithm: Algorithm, model: Model) -> bool:
    """Whether the method's cache takes a prompt in as it takes in what follows, so that it may be read in parts."""
    bare: Any = algorithm.bare()
    network: Any = model
    return not isinstance(_cache(bare, network, 1, 256), PromptPhase)


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
    capacity = size if algorithm.caches else 0
    needs, has = _bytes(bare, network, rows, capacity) + rows * size * BESIDE, _machine(mesh)
    where = ""
    if jax.default_backend() != "cpu" and (there := _bytes(bare, network, rows, capacity, hosted=True)):
        needs -= there      # on a CPU both memories are the same one
        if (host := _host()) is not None and there > host:
            needs, has, where = there, host, "the host's "
    if size < 1 << 30 and (has is None or needs <= has):
        return
    held = "positions are 32-bit numbers" if has is None else f"there are {_units(has)}"
    raise ValueError(
        f"{name}: {rows:,} row{'s' * (rows > 1)} of up to {longest:,} tokens take about {_units(needs)} of "
        f"{where}memory, {held}; give a smaller max_new_tokens or max_length, fewer samples, or a batch_size")


def _bytes(algorithm: Any, model: Any, rows: int, capacity: int, hosted: bool = False) -> int:
    """What the cache of a batch takes, or what of it lies in the host's memory."""
    if not capacity:
        return 0
    cache = _cache(algorithm, model, rows, capacity)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache.layout.hosted if hosted else cache))


@functools.lru_cache(maxsize=256)
def _cache(algorithm: Any, model: Any, rows: int, capacity: int) -> Cache:
    """The cache of a batch, by its shapes."""
    network = algorithm.through(model)
    make = lambda: instance("cache: the kind that was given", network.init_cache(rows, capacity), Cache, "a Cache")
    return jax.eval_shape(make)


def _machine(mesh: Mesh | None) -> int | None:
    """Bytes of memory that a batch may lie in; None if the machine does not tell."""
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    stats = devices[0].memory_stats() if devices[0].process_index == jax.process_index() else None
    if stats and stats.get("bytes_limit"):
        return stats["bytes_limit"] * len(devices)
    return _host()


def _host() -> int | None:
    """Bytes of the memory of this machine; None if it does not tell."""
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
