"""Sizes of buffers and batches, and a check that the machine has the memory for them before anything is allocated."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from decodax.common.axes import replicas
from decodax.core.algorithm import Algorithm
from decodax.core.cache import Cache
from decodax.core.capabilities import PromptPhase, check_prefix, needs_refresh, prefill_cache
from decodax.core.checks import instance, statics
from decodax.core.start import check_fit
from decodax.core.types import Model

BESIDE = 16
"""Bytes per position besides keys and values: the token, log-probabilities, data of a diffusion canvas."""


SPARE = 256 << 20
"""Largest number of bytes of cache for rows that only pad a batch."""

NARROW = {"cpu": 8, "other": 256}
"""Number of tokens in a round up to which reading the weights dominates its cost, by platform."""


def bucket(length: int) -> int:
    """Returns the buffer size for sequences of `length` tokens: a power of two from 256 to 1,024, then a multiple of
    1,024.

    Programs are compiled once for each size. The cost of a step depends on the tokens in the rows, not on the buffer
    size.
    """
    return max(power(length), 256) if length <= 1024 else -(-length // 1024) * 1024


def batch(algorithm: Algorithm, model: Model, mesh: Mesh | None, rows: int, size: int) -> int:
    """Returns the number of rows of the compiled programs for a batch of `rows`. The additional rows are padding,
    finished from the start.

    Programs are compiled once for each number of rows. So 2 to 8 rows run as 8, and more as a multiple of 8, if the
    padding is cheap: its cache fits in `SPARE`, and the tokens of a round with padding are at most `NARROW` or at most
    5/4 of those without. Otherwise the number is rounded up to a multiple of an eighth of the next power of two. If
    rows share memory (`Layout.by_row` is False), none are added. A single row is not padded: on a busy 2-core CPU a
    step of a 125M shape takes 40 ms with one row, 51 with 4 and 65 with 8; a step of `pycode` takes 2.0 ms with one
    row, 4.1 with two and 7.3 with 8. On a mesh the number is always a multiple of the data axis.

    >>> from decodax import Autoregressive
    >>> from decodax.models import Transformer, llama
    >>> model = Transformer(llama(vocab=32, width=16, layers=1, heads=2, kv_heads=1, mlp=24, context=256))
    >>> [batch(Autoregressive(), model, None, n, 256) for n in (1, 2, 5, 8, 9, 20, 100)]
    [1, 8, 8, 8, 10, 24, 112]

    Args:
        algorithm: the decoding method.
        model: the network.
        mesh: the device mesh, or None.
        rows: number of rows that are needed.
        size: number of token slots of a row.
    """
    bare: Any = algorithm.bare()
    network: Any = model
    row = _bytes(bare, network, 1, size if algorithm.traits.caches else 0)
    narrow = NARROW["cpu" if jax.default_backend() == "cpu" else "other"]
    octave, many = power(rows) // 8, rows
    if rows > 1 and _cache(bare, network, 1, size if algorithm.traits.caches else 0).layout.by_row:
        coarse, fine = (-(-rows // step) * step for step in (max(octave, 8), max(octave, 1)))
        cheap = coarse * algorithm.traits.emits <= narrow or 4 * coarse <= 5 * rows
        many = coarse if cheap and (coarse - rows) * row <= SPARE else fine if (fine - rows) * row <= SPARE else rows
    parts = replicas(mesh)
    return -(-many // parts) * parts


def by_row(algorithm: Algorithm, model: Model) -> bool:
    """Returns True if single rows of the cache that `model` makes for the method can be replaced, because rows share no
    arrays (`Layout.by_row`); also if the method uses no cache."""
    bare: Any = algorithm.bare()
    network: Any = model
    return not algorithm.traits.caches or _cache(bare, network, 1, 256).layout.by_row


def grows(algorithm: Algorithm, model: Model) -> bool:
    """Returns True if the cache that `model` makes for the method stores prompt tokens like generated tokens, with no
    step after prefill. A prompt may then be prefilled in several parts."""
    bare: Any = algorithm.bare()
    network: Any = model
    return not isinstance(_cache(bare, network, 1, 256), PromptPhase)


def check_context(algorithm: Algorithm, model: Model) -> None:
    """Raises ValueError if the cache that `model` makes for the method cannot be filled with keys and values that were
    computed before (`LoadsPrefix`)."""
    bare: Any = algorithm.bare()
    network: Any = model
    check_prefix(jax.eval_shape(prefill_cache, _cache(bare, network, 1, 256)))


def refreshing(algorithm: Algorithm, model: Model, capacity: int) -> str | None:
    """Returns the class of the cache that `model` makes for the method if it recomputes entries while decoding
    (`Refreshes`); otherwise None."""
    bare: Any = algorithm.bare()
    network: Any = model
    cache = _cache(bare, network, 1, capacity)
    return None if jax.eval_shape(needs_refresh, cache) is None else type(cache).__name__


def power(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def afford(algorithm: Algorithm, model: Model, mesh: Mesh | None, rows: int, longest: int, name: str) -> None:
    """Checks that method, model and cache can be combined (`decodax.core.start.check_fit`), and that a batch of `rows`
    sequences of up to `longest` tokens fits the memory of the machine.

    The estimate covers the cache and the token buffers, but not the cache of a draft model or the activations of a
    step. So only batches that are certainly too large are refused. `name` is the argument that sets the length; errors
    begin with it.

    Raises:
        ValueError: they cannot be combined; or the batch does not fit, and the error says how much memory it needs.
    """
    size = bucket(longest)
    bare: Any = algorithm.bare()
    network: Any = model
    capacity = size if algorithm.traits.caches else 0
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
    """Returns the bytes of the cache of a batch, or with `hosted` those in host memory."""
    cache = _cache(algorithm, model, rows, capacity)
    if not capacity:
        return 0
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache.layout.hosted if hosted else cache))


@functools.lru_cache(maxsize=256)
def _cache(algorithm: Any, model: Any, rows: int, capacity: int) -> Cache:
    """Returns the cache of a batch as shapes and dtypes, without memory, after `check_fit`."""
    network = algorithm.wrap_model(model)

    def make() -> Cache:
        made = instance("cache: the kind that was given", network.init_cache(rows, capacity), Cache, "a Cache")
        statics("cache", made)
        check_fit(algorithm, network, made)
        return made

    return jax.eval_shape(make)


def _machine(mesh: Mesh | None) -> int | None:
    """Returns the bytes of memory for a batch, on all devices of the mesh; None if unknown."""
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    stats = devices[0].memory_stats() if devices[0].process_index == jax.process_index() else None
    if stats and stats.get("bytes_limit"):
        return stats["bytes_limit"] * len(devices)
    return _host()


def _host() -> int | None:
    """Returns the bytes of host memory; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):      # Windows
        return None


def _units(count: int) -> str:
    """Formats a number of bytes with a unit.

    >>> _units(3_400_000_000_000)
    '3.4 TB'
    """
    power = min(max((len(str(count)) - 1) // 3, 0), 6)
    return f"{count / 1000 ** power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[power]}"
