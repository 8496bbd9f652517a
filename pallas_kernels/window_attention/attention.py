"""Window attention: to the window's own keys and to what the cache holds, merged by their softmax sums."""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.common.axes import DATA, MODEL, compute_capability, platform, shardwise
from decodax.pallas_kernels.window_attention import reference
from decodax.pallas_kernels.window_attention.reference import MASKED

Implementation = Literal["xla", "mosaic_tpu", "triton"]

Added = Callable[[Array, Array], Array]
"""What is added to the scores of some keys `f[B, G, K, d]` at positions `i32[B or 1, G or 1, 1, K]` (apart for each
key/value head where a cache keeps other tokens in each): `f32[B or 1, H or 1, W, K]`."""

Bias = Callable[[Array, Array], Added]
"""Makes `Added` for the queries `f[B, H, W, d]` of a window, once, from them and their positions `i32[B, 1, W, 1]`."""


class FixedBias(abc.ABC):
    """A `Bias` that has no arrays of its own. A subclass is a frozen dataclass: compared by value, it is traced once
    for all layers, and each device of a mesh adds it to the scores of its own heads."""

    @abc.abstractmethod
    def __call__(self, q: Array, positions: Array) -> Added: ...


def by_position(scores: Callable[[Array, Array], Array]) -> Bias:
    """A bias from positions alone: `scores(positions of queries, positions of keys)`."""
    return lambda q, positions: lambda k, where: scores(positions, where)



def window_attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                     length: Array | None = None, *, scale: float,
                     sliding: int | None = None, softcap: float | None = None,
                     key_positions: Array | None = None, cached: Array | None = None,
                     slot_positions: Array | None = None, bias: Bias | None = None, sinks: Array | None = None,
                     scales: Array | None = None, table: Array | None = None,
                     implementation: Implementation | None = None) -> Array:
    """Attention of window queries to verified cache entries and to the window.

    Args:
        q: `f[B, W, H, d]` queries. k, v: `f[B, K, G, d]` and `f[B, K, G, e]` keys and values of the window, `H` a
            multiple of `G`; `K` is `W` unless nodes of earlier windows stand before its own.
        mask: `bool[B or 1, W, K]`, who sees whom inside the window; each node sees at least one.
        positions: `i32[B, W]`.
        cache: `f[B, G, S, d + e]`, each entry's key and behind it its value; None without a cache (training, scoring).
        length: `i32[B]` verified entries of a cache whose slots are positions.
        scale: factor of the scores before softcap and softmax.
        sliding: a query sees positions above its own minus this.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        key_positions: `i32[B, K]` of `k`; default `positions`.
        cached: `bool[B, S]` the verified entries that a row sees; None: all of them; `bool[B, 0]`: none.
        slot_positions: `i32[B, G or 1, S]` the position of the token in each slot, -1 where there is none, of a cache
            whose slots are not positions; in place of `length` and `cached`.
        bias: what is added to the scores, after softcap: relative position biases (T5), slopes (ALiBi), the difference
            that another position would make (dual chunk attention).
        sinks: `f[H]`, a learned score of each head that takes part in the softmax and has no value (GPT-OSS): weights
            add up to less than one. Where parts are merged it belongs to one of them.
        scales: `f[B, G, 2, S]`, by which each slot's key and value are to be multiplied: of a cache of `i8`, which
            `quantized` makes.
        table: `i32[B, N]`, the pages that hold a row's slots, of a cache `f[P, G, page, d + e]` of pages for all rows,
            and of scales `f[P, G, 2, page]`; `S` is `N * page`. What it says of pages behind `length` does not matter.
        implementation: how the cache is read: "xla", or by a kernel, "mosaic_tpu" for TPUs or "triton" for GPUs, which
            run interpreted on a CPU; None: the fastest that can be had (see `choose`).

    Returns:
        `f[B, W, H, e]` in the dtype of `q`. Scores and sums are float32.
    """
    return window_attention_lse(q, k, v, mask, positions, cache, length, scale=scale, sliding=sliding,
                                softcap=softcap, key_positions=key_positions, cached=cached,
                                slot_positions=slot_positions, bias=bias, sinks=sinks, scales=scales, table=table,
                                implementation=implementation)[0]


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to several sets of keys as attention to all of them. Each part, and the result, is what
    `window_attention_lse` gives."""
    return functools.reduce(_merge, parts)


def _merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, x), (b, y) = one, other
    top = jnp.maximum(x, y)
    left, right = jnp.exp(x - top), jnp.exp(y - top)
    total = left + right
    return ((a * left[..., None] + b * right[..., None]) / total[..., None]).astype(a.dtype), top + jnp.log(total)


def window_attention_lse(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                         length: Array | None = None, *, scale: float,
                         sliding: int | None = None, softcap: float | None = None,
                         key_positions: Array | None = None, cached: Array | None = None,
                         slot_positions: Array | None = None, bias: Bias | None = None, sinks: Array | None = None,
                         scales: Array | None = None, table: Array | None = None,
                         implementation: Implementation | None = None) -> tuple[Array, Array]:
    """As `window_attention`, with the logarithm of each query's softmax sum, `f32[B, W, H]`: the weight of a key with
    score `s` is `exp(s - lse)`, and `merge` adds attention to other keys. About -1e30 where a query sees nothing."""
    _check(implementation, cache, scales)
    if bias is not None and implementation not in (None, "xla"):
        raise ValueError(f"implementation: got {implementation!r}, which takes no bias")
    arrays = q, k, v, mask, positions, cache, length, key_positions, cached, slot_positions, sinks, scales, table
    options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias)
    if bias is None:
        return _attention_once(*arrays, **options, implementation=implementation or choose(cache))
    # a bias that closes over weights is no static value, and made for all heads
    attention = _attention_once if isinstance(bias, FixedBias) else _attention
    return attention(*arrays, **options, implementation="xla")


def prefix_attention(q: Array, positions: Array, cache: Array, length: Array, *, scale: float,
                     sliding: int | None = None, softcap: float | None = None, scales: Array | None = None,
                     table: Array | None = None, implementation: Implementation | None = None) -> tuple[Array, Array]:
    """Attention of many rows to what they have in common: a prefix that is read once for all of them (Hydragen,
    Juravsky et al. 2024). Their queries are to it those of one row.

    `merge` adds the rest, a row's own cache and its window, as `window_attention_lse` gives it. Where a layer is
    `sliding`, that has to know where the own cache begins: by `slot_positions`.

    Args:
        q: `f[B, W, H, d]`. positions: `i32[B, W]`.
        cache: `f[N, G, S, d + e]`, prefixes of `B / N` rows each, which follow each other; or pages, with `table`.
        length: `i32[N]`.
        scale, sliding, softcap, scales, table, implementation: as in `window_attention`.

    Returns:
        As `window_attention_lse`.
    """
    _check(implementation, cache, scales)
    if q.shape[0] % length.shape[0]:
        raise ValueError(f"q: got {q.shape[0]} rows, takes a multiple of the {length.shape[0]} prefixes")
    return _prefix_once(q, positions, cache, length, scales, table, scale=scale, sliding=sliding, softcap=softcap,
                        implementation=implementation or choose(cache))


def slot_weights(q: Array, lse: Array, positions: Array, cache: Array, length: Array | None = None, *, scale: float,
                 sliding: int | None = None, softcap: float | None = None, cached: Array | None = None,
                 slot_positions: Array | None = None, scales: Array | None = None, table: Array | None = None,
                 causal: bool = False, implementation: Implementation | None = None) -> Array:
    """How much attention each cache slot receives: its softmax weights, summed over queries and over the heads of a
    group. This is the statistic of caches that forget by attention (H2O, SnapKV).

    It is a second pass over the keys, for which `window_attention_lse` and an entry of the cache keep what it needs:
    queries, and the logarithms of their softmax sums over window and cache. So it costs nothing where it is not asked
    for, and can wait for a decision: only nodes that are committed should count.

    Args:
        q: `f[B, W, H, d]`. lse: `f32[B, W, H]`, as `window_attention_lse` or `merge` gives it; inf for a query that
            does not count.
        causal: a query sees no slot whose token is behind its own position: for queries whose own keys have been
            written.
        positions, cache, length, scale, sliding, softcap, cached, slot_positions, scales, table, implementation: as
            in `window_attention`.

    Returns:
        `f32[B, G, S]`, 0 where nothing is seen.
    """
    _check(implementation, cache, scales)
    arrays = q, lse, positions, cache, length, cached, slot_positions, scales, table
    return _weights_once(*arrays, scale=scale, sliding=sliding, softcap=softcap, causal=causal,
                         implementation=implementation or choose(cache))


def quantized(cache: Array, width: int) -> tuple[Array, Array]:
    """A cache of integers, `i8[..., S, d + e]`, and its scales `f32[..., 2, S]`: keys and values are rounded to
    multiples of a 127th of their largest entry, apart for each slot and head. Slots are the last axis, which a TPU pads
    to 128: scales `[S, 2]` would take 64 times their bytes.

    Args:
        cache: `f[..., S, d + e]`. width: `d`.
    """
    parts = [x.astype(jnp.float32) for x in (cache[..., :width], cache[..., width:])]
    scales = [jnp.abs(x).max(-1) / 127 for x in parts]
    codes = [jnp.round(x / jnp.where(n > 0, n, 1)[..., None]) for x, n in zip(parts, scales, strict=True)]
    return jnp.concatenate(codes, -1).astype(jnp.int8), jnp.stack(scales, -2)


def _check(implementation: str | None, cache: Array | None, scales: Array | None) -> None:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation: got {implementation!r}, takes 'xla', 'mosaic_tpu' or 'triton'")
    if cache is not None and jnp.issubdtype(cache.dtype, jnp.integer) != (scales is not None):
        raise ValueError(f"scales: got {'none' if scales is None else 'some'} for a cache of {cache.dtype}, takes them "
                         "where it is of integers")


def choose(cache: Array | None) -> Implementation | None:
    """The implementation for a cache `f[B, G, S, D]`, or its pages: "xla", or None for the kernel of the accelerator
    wherever the program is lowered for it.

    A kernel wants to know the mesh: the compiler cannot divide it over devices by itself. That for TPUs wants slots in
    blocks of 128, that for GPUs a JAX that has Triton and a chip from Ampere on, which multiplies bfloat16.
    """
    where = platform()
    if where == "cpu" or cache is None or (jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1):
        return "xla"
    return None if (_runs_triton() if where == "gpu" else cache.shape[2] % 128 == 0) else "xla"


@functools.cache
def _runs_triton() -> bool:
    return compute_capability() >= 8 and importlib.util.find_spec("jax.experimental.pallas.triton") is not None


# traced and lowered once for all layers of a kind
@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap", "bias", "implementation"))
def _attention_once(*arrays: Any, implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    q, mask, slot_positions, table = arrays[0], arrays[3], arrays[9], arrays[12]
    heads, rows, cache = P(DATA, None, MODEL), P(DATA), P(DATA if table is None else None, MODEL)
    specs = (heads, heads, heads, rows if mask.shape[0] == q.shape[0] else P(), rows, cache, rows, rows, rows,
             _slots(slot_positions), P(MODEL), cache, rows)
    local = functools.partial(_attention, implementation=implementation, **options)
    return shardwise(local, specs, (heads, heads), *arrays, whole=implementation != "xla")


@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap", "implementation"))
def _prefix_once(*arrays: Any, implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    length, table = arrays[3], arrays[5]
    prefixes = DATA if length.shape[0] > 1 else None     # a single one is every device's
    heads, cache = P(DATA, None, MODEL), P(prefixes if table is None else None, MODEL)
    specs = heads, P(DATA), cache, P(prefixes), cache, P(prefixes)
    local = functools.partial(_prefix, implementation=implementation, **options)
    return shardwise(local, specs, (heads, heads), *arrays, whole=implementation != "xla")


@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap", "causal", "implementation"))
def _weights_once(*arrays: Any, implementation: Implementation | None, **options: Any) -> Array:
    slot_positions, table = arrays[6], arrays[8]
    heads, rows, cache = P(DATA, None, MODEL), P(DATA), P(DATA if table is None else None, MODEL)
    specs = heads, heads, rows, cache, rows, rows, _slots(slot_positions), cache, rows
    local = functools.partial(_weights, implementation=implementation, **options)
    return shardwise(local, specs, P(DATA, MODEL), *arrays, whole=implementation != "xla")


def _slots(slot_positions: Array | None) -> P:
    return P(DATA, MODEL if slot_positions is not None and slot_positions.shape[1] > 1 else None)


def _attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None, length: Array | None,
               key_positions: Array | None, cached: Array | None, slot_positions: Array | None,
               sinks: Array | None, scales: Array | None, table: Array | None, *, scale: float, sliding: int | None,
               softcap: float | None, bias: Bias | None, implementation: Implementation | None) -> tuple[Array, Array]:
    """See `window_attention_lse`."""
    B, W, H, _ = q.shape
    G, e = k.shape[2], v.shape[3]
    added = None if bias is None else bias(q.swapaxes(1, 2), positions[:, None, :, None])
    dtype, q = q.dtype, _folded(q, G)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def biases(keys: Array, where: Array) -> Array:       # of keys at `where` [B or 1, G or 1, K]
        assert added is not None
        more = added(keys, where[:, :, None])
        return jnp.broadcast_to(more, (B, H, W, where.shape[2])).reshape(B, G, -1, where.shape[2])

    where = positions if key_positions is None else key_positions
    if sliding is not None:
        mask = mask & (positions[:, :, None] - where[:, None, :] < sliding)
    s = jnp.einsum("bgqd,bgkd->bgqk", q, k, preferred_element_type=jnp.float32) * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = s if bias is None else s + biases(k, where[:, None])
    s = jnp.where(mask[:, None, None], s.reshape(B, G, H // G, W, -1), MASKED).reshape(s.shape)
    top = s.max(-1, keepdims=True)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bgqk,bgkd->bgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    lse = (top + jnp.log(total))[..., 0]

    blind = cached is not None and cached.shape[1] == 0
    if cache is not None and cache.shape[2] and not blind:
        length, held = _held(cache, table, length, cached, slot_positions)
        given = q, cache, length, _repeated(positions, H // G), held, scales, table
        part = _read("cache_attention", implementation, given, dict(bias=None if bias is None else biases), scale=scale,
                     value_width=e, sliding=sliding, softcap=softcap)
        out, lse = merge((out, lse), part)
    if sinks is not None:
        scores = jnp.repeat(sinks.astype(jnp.float32), W).reshape(G, -1)
        out, lse = merge((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(scores, lse.shape)))
    return _unfolded(out.astype(dtype), W), _unfolded(lse, W)


def _prefix(q: Array, positions: Array, cache: Array, length: Array, scales: Array | None, table: Array | None, *,
            implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    """See `prefix_attention`."""
    B, W, H, d = q.shape
    N, G = length.shape[0], cache.shape[1]
    given = (_folded(q.reshape(N, -1, H, d), G), cache, length, _repeated(positions.reshape(N, -1), H // G), None,
             scales, table)
    out, lse = _read("cache_attention", implementation, given, {}, value_width=cache.shape[3] - d, **options)
    each = B // N * W
    return _unfolded(out.astype(q.dtype), each).reshape(B, W, H, -1), _unfolded(lse, each).reshape(B, W, H)


def _weights(q: Array, lse: Array, positions: Array, cache: Array, length: Array | None, cached: Array | None,
             slot_positions: Array | None, scales: Array | None, table: Array | None, *,
             implementation: Implementation | None, **options: Any) -> Array:
    """See `slot_weights`."""
    G = cache.shape[1]
    length, held = _held(cache, table, length, cached, slot_positions)
    given = _folded(q, G), _folded(lse, G), cache, length, _repeated(positions, q.shape[2] // G), held, scales, table
    return _read("slot_weights", implementation, given, {}, **options)


def _folded(x: Array, heads: int) -> Array:
    """`[B, W, H, ...]` as `[B, G, H / G * W, ...]`: the queries of each head of keys and values."""
    B, W, H, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, W, heads, H // heads, *rest), 1, 3).reshape(B, heads, H // heads * W, *rest)


def _unfolded(x: Array, width: int) -> Array:
    """`[B, G, H / G * W, ...]` as `[B, W, H, ...]`."""
    B, G, R, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, G, R // width, width, *rest), 3, 1).reshape(B, width, G * R // width, *rest)


def _repeated(positions: Array, times: int) -> Array:
    """`[B, W]` as `[B, H / G * W]`."""
    B, W = positions.shape
    return jnp.broadcast_to(positions[:, None], (B, times, W)).reshape(B, -1)


def _held(cache: Array, table: Array | None, length: Array | None, cached: Array | None,
          held: Array | None) -> tuple[Array, Array | None]:
    """What an implementation is told of a cache: where what is read ends and, unless slots are positions, the positions
    of what is seen."""
    slots = cache.shape[2] * (1 if table is None else table.shape[1])
    place = jnp.arange(slots, dtype=jnp.int32)
    if held is not None:
        length = jnp.where((held >= 0).any(1), place + 1, 0).max(1)
    assert length is not None
    if cached is not None:      # what is read ends behind the last entry that a row sees
        held = jnp.where(cached & (place < length[:, None]), place, -1)[:, None]
        length = jnp.where(held >= 0, place + 1, 0).max((1, 2))
    return length, held


def _read(name: str, implementation: Implementation | None, given: tuple[Array | None, ...], plain: dict[str, Any],
          **options: Any) -> Any:
    """The function `name` of an implementation; `plain` are options of the reference alone."""
    walk: Callable[..., Any] = functools.partial(getattr(reference, name), **options, **plain)
    if implementation == "xla":
        return walk(*given)
    # imports what the others do without
    kind = "gpu" if implementation == "triton" or (implementation is None and platform() == "gpu") else "tpu"
    module = importlib.import_module(f"decodax.pallas_kernels.window_attention.{kind}")
    kernel: Callable[..., Any] = functools.partial(getattr(module, name), **options)
    if implementation is None:
        return lax.platform_dependent(*given, **{"cuda" if kind == "gpu" else kind: kernel}, default=walk)
    return kernel(*given, interpret=platform() == "cpu")
