"""Window attention: attention to the window's own keys and to the cache, merged by their softmax sums."""

from __future__ import annotations

import dataclasses
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
from decodax.pallas_kernels.window_attention.biases import Bias, FixedBias
from decodax.pallas_kernels.window_attention.merging import merge, with_sinks
from decodax.pallas_kernels.window_attention.pooled import PooledKeys
from decodax.pallas_kernels.window_attention.reference import MASKED
from decodax.pallas_kernels.window_attention.selection import CachedKeys, KeyChoice, TopBlocks

Implementation = Literal["xla", "mosaic_tpu", "triton"]


def window_attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                     length: Array | None = None, *, scale: float,
                     sliding: int | None = None, softcap: float | None = None,
                     key_positions: Array | None = None, cached: Array | None = None,
                     slot_positions: Array | None = None, bias: Bias | None = None, sinks: Array | None = None,
                     scales: Array | None = None, table: Array | None = None,
                     implementation: Implementation | None = None) -> Array:
    """Returns attention of window queries to the verified cache entries and to the window.

    Args:
        q: `f[B, W, H, d]`, queries.
        k: `f[B, K, G, d]`, keys of the window; `H` is a multiple of `G`, and `K` is `W` unless nodes of earlier windows
            precede the window's own.
        v: `f[B, K, G, e]`, values of the window. With `e = 0` the keys are the values, too, and a slot of the cache
            has a key alone (latents, `decodax.models.latent`); the output then has width `d`.
        mask: `bool[B or 1, W, K]`, the keys of the window that each query attends to, at least one.
        positions: `i32[B, W]`, positions of the queries.
        cache: `f[B, G, S, d + e]`, the key and then the value of each entry; None: no cache (training, scoring).
        length: `i32[B]`, number of verified entries, for a cache whose slots are positions.
        scale: factor of the scores before softcap and softmax.
        sliding: a query attends only to positions above its own minus this.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        key_positions: `i32[B, K]`, positions of `k`; None: `positions`.
        cached: `bool[B, S]`, the verified entries that a row attends to; None: all; `bool[B, 0]`: none.
        slot_positions: `i32[B, G or 1, S]`, position of the token in each slot, -1 for an empty slot, for a cache whose
            slots are not positions; replaces `length` and `cached`.
        bias: added to the scores after softcap: relative position biases (T5), slopes (ALiBi), the effect of another
            position (dual chunk attention); or a choice of keys. With `TopBlocks` keys are longer than queries.
        sinks: `f[H]`, a learned score for each head that takes part in the softmax without a value (GPT-OSS), so that
            weights sum to less than one. When parts are merged, only one of them gets the sinks.
        scales: `f[B, G, 2, S]`, factors of each slot's key and value, for an `i8` cache from `quantized`.
        table: `i32[B, N]`, the pages of each row, for a cache `f[P, G, page, d + e]` of pages for all rows, with scales
            `f[P, G, 2, page]`; `S` is `N * page`. Entries for pages at or beyond `length` may be any number.
        implementation: implementation of attention to the cache: "xla", or a kernel, "mosaic_tpu" for TPUs or "triton"
            for GPUs, which runs in interpreter mode on a CPU. None: the fastest available (see `choose`). Keys that are
            values, too, are not supported by "triton".

    Returns:
        `f[B, W, H, e]` in the dtype of `q`. Scores and sums are float32.

    Raises:
        ValueError: the implementation is unknown or does not support `bias`, or `scales` do not match the cache's
            dtype.
    """
    return window_attention_lse(q, k, v, mask, positions, cache, length, scale=scale, sliding=sliding,
                                softcap=softcap, key_positions=key_positions, cached=cached,
                                slot_positions=slot_positions, bias=bias, sinks=sinks, scales=scales, table=table,
                                implementation=implementation)[0]


def window_attention_lse(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                         length: Array | None = None, *, scale: float,
                         sliding: int | None = None, softcap: float | None = None,
                         key_positions: Array | None = None, cached: Array | None = None,
                         slot_positions: Array | None = None, bias: Bias | None = None, sinks: Array | None = None,
                         scales: Array | None = None, table: Array | None = None,
                         implementation: Implementation | None = None) -> tuple[Array, Array]:
    """Returns the result of `window_attention`, and the logarithm of each query's softmax sum, `f32[B, W, H]`.

    The weight of a key with score `s` is `exp(s - lse)`, and `merge` adds attention to other keys. The logarithm is
    about -1e30 for a query that attends to nothing. For the arguments see `window_attention`.
    """
    _check(implementation, cache, scales, q.shape[3])
    if bias is not None and implementation not in (None, "xla"):
        raise ValueError(f"implementation: got {implementation!r}, which does not support a bias")
    arrays = q, k, v, mask, positions, cache, length, key_positions, cached, slot_positions, sinks, scales, table
    options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias)
    if bias is None:
        return _attention_once(*arrays, None, **options, implementation=implementation or choose(cache, q.shape[3]))
    if isinstance(bias, TopBlocks):
        options["bias"] = dataclasses.replace(bias, queries=None)
        return _attention_once(*arrays, bias.queries, **options, implementation="xla")
    # A bias that closes over weights is not a static value, and it covers all heads.
    attention = _attention_once if isinstance(bias, FixedBias) else _attention
    return attention(*arrays, None, **options, implementation="xla")


def prefix_attention(q: Array, positions: Array, cache: Array, length: Array, *, scale: float,
                     sliding: int | None = None, softcap: float | None = None, scales: Array | None = None,
                     table: Array | None = None, implementation: Implementation | None = None) -> tuple[Array, Array]:
    """Returns attention of many rows to their common prefix, which is read once for all of them (Hydragen, Juravsky et
    al., 2024). The queries of these rows are treated as those of one row.

    `merge` adds attention to a row's own cache and window, the result of `window_attention_lse`. In a layer with
    `sliding`, that call needs `slot_positions`, since the own cache does not begin at position 0.

    Args:
        q: `f[B, W, H, d]`, queries.
        positions: `i32[B, W]`, their positions.
        cache: `f[N, G, S, d + e]`, prefixes of `B / N` consecutive rows each; or pages, with `table`.
        length: `i32[N]`, number of tokens of each prefix.
        scale, sliding, softcap, scales, table, implementation: see `window_attention`.

    Returns:
        The output and the logarithms of its softmax sums; see `window_attention_lse`.

    Raises:
        ValueError: see `window_attention`; or the number of rows is not a multiple of the number of prefixes.
    """
    _check(implementation, cache, scales, q.shape[3])
    if q.shape[0] % length.shape[0]:
        raise ValueError(f"q: got {q.shape[0]} rows, takes a multiple of the {length.shape[0]} prefixes")
    return _prefix_once(q, positions, cache, length, scales, table, scale=scale, sliding=sliding, softcap=softcap,
                        implementation=implementation or choose(cache, q.shape[3]))


def slot_weights(q: Array, lse: Array, positions: Array, cache: Array, length: Array | None = None, *, scale: float,
                 sliding: int | None = None, softcap: float | None = None, cached: Array | None = None,
                 slot_positions: Array | None = None, scales: Array | None = None, table: Array | None = None,
                 causal: bool = False, implementation: Implementation | None = None) -> Array:
    """Returns the attention that each cache slot receives: its softmax weights, summed over the queries and over the
    heads of a group, `f32[B, G, S]`; 0 if no query attends to the slot.

    Caches that evict by attention (H2O, SnapKV) use this statistic. It takes a second pass over the keys, which needs
    the queries and the logarithms of their softmax sums over window and cache; `window_attention_lse` returns these,
    and an entry of the cache can store them. So it costs nothing unless requested, and it can be computed after
    verification, because only committed nodes should count.

    Args:
        q: `f[B, W, H, d]`, queries.
        lse: `f32[B, W, H]`, logarithms of their softmax sums, from `window_attention_lse` or `merge`; inf for a query
            that does not count.
        causal: whether a query does not attend to slots whose tokens are after its own position; for queries whose own
            keys are already in the cache.
        positions, cache, length, scale, sliding, softcap, cached, slot_positions, scales, table, implementation: see
            `window_attention`.
    """
    _check(implementation, cache, scales)
    arrays = q, lse, positions, cache, length, cached, slot_positions, scales, table
    return _weights_once(*arrays, scale=scale, sliding=sliding, softcap=softcap, causal=causal,
                         implementation=implementation or choose(cache))


def quantized(cache: Array, width: int) -> tuple[Array, Array]:
    """Rounds keys and values to integers. Returns the cache `i8[..., S, d + e]` and its scales `f32[..., 2, S]`.

    A key or value is rounded to multiples of a 127th of its largest entry, separately for each slot and head. Slots are
    the last axis of the scales, which a TPU pads to 128: scales `[S, 2]` would take 64 times their bytes.

    Args:
        cache: `f[..., S, d + e]`, keys and then values.
        width: width of keys, `d`.
    """
    parts = [x.astype(jnp.float32) for x in (cache[..., :width], cache[..., width:])]
    scales = [jnp.abs(x).max(-1) / 127 for x in parts]
    codes = [jnp.round(x / jnp.where(n > 0, n, 1)[..., None]) for x, n in zip(parts, scales, strict=True)]
    return jnp.concatenate(codes, -1).astype(jnp.int8), jnp.stack(scales, -2)


def _check(implementation: str | None, cache: Array | None, scales: Array | None, width: int | None = None) -> None:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation: got {implementation!r}, takes 'xla', 'mosaic_tpu' or 'triton'")
    if cache is not None and jnp.issubdtype(cache.dtype, jnp.integer) != (scales is not None):
        raise ValueError(f"scales: got {'none' if scales is None else 'some'} for a cache of {cache.dtype}, takes them "
                         "with a cache of integers only")
    if cache is not None and cache.shape[3] == width and (implementation == "triton" or scales is not None):
        which = implementation if scales is None else "scales"
        raise ValueError(f"cache: got keys that are values, too, with {which}, takes keys and values")


def choose(cache: Array | None, width: int | None = None) -> Implementation | None:
    """Returns the implementation for a cache `f[B, G, S, D]`, or its pages, with keys of `width`: "xla", or None for
    the accelerator's kernel if the program is lowered for it.

    A kernel needs the mesh, because the compiler cannot divide it over devices by itself. The TPU kernel needs slots in
    blocks of 128; the GPU kernel needs a JAX with Triton and a chip that multiplies bfloat16 (Ampere or later).
    """
    where = platform()
    if where == "cpu" or cache is None or (jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1):
        return "xla"
    # On a GPU, a query's sums over whole latents do not fit in a program's registers, and sums over values of more than
    # 256 channels (512 in Gemma 4) have not been tried.
    gpu = lambda: (width is None or 0 < cache.shape[3] - width <= 256) and _runs_triton()
    return None if (gpu() if where == "gpu" else cache.shape[2] % 128 == 0) else "xla"


@functools.cache
def _runs_triton() -> bool:
    return compute_capability() >= 8 and importlib.util.find_spec("jax.experimental.pallas.triton") is not None


# Traced and lowered once for all layers of a kind.
@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap", "bias", "implementation"))
def _attention_once(*arrays: Any, implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    q, k, mask, slot_positions, table = arrays[0], arrays[1], arrays[3], arrays[9], arrays[12]
    # All devices have a single key/value head, such as a latent, and each its own query heads.
    alone = k.shape[2] == 1 and options["bias"] is None
    heads, rows = P(DATA, None, MODEL), P(DATA)
    keys, cache = rows if alone else heads, P(DATA if table is None else None, None if alone else MODEL)
    specs = (heads, keys, keys, rows if mask.shape[0] == q.shape[0] else P(), rows, cache, rows, rows, rows,
             _slots(slot_positions), P(MODEL), cache, rows, heads)
    # Loops of a choice of blocks are as long as a device's rows need: a collective in them would wait for others.
    whole = implementation != "xla" or isinstance(options["bias"], TopBlocks)
    local = functools.partial(_attention, implementation=implementation, **options)
    return shardwise(local, specs, (heads, heads), *arrays, whole=whole)


@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap", "implementation"))
def _prefix_once(*arrays: Any, implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    length, table = arrays[3], arrays[5]
    prefixes = DATA if length.shape[0] > 1 else None     # a single prefix is replicated
    heads = P(DATA, None, MODEL)
    cache = P(prefixes if table is None else None, None if arrays[2].shape[1] == 1 else MODEL)
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
               sinks: Array | None, scales: Array | None, table: Array | None, asked: Array | None, *, scale: float,
               sliding: int | None, softcap: float | None, bias: Bias | None,
               implementation: Implementation | None) -> tuple[Array, Array]:
    """See `window_attention_lse`; `asked` are the index queries of `TopBlocks`."""
    B, W, H, _ = q.shape
    where = positions if key_positions is None else key_positions
    visible = None
    if cache is not None and cache.shape[2] and not (cached is not None and cached.shape[1] == 0):
        visible = CachedKeys(cache, *_held(cache, table, length, cached, slot_positions), scales, table)
    if isinstance(bias, KeyChoice | PooledKeys) and slot_positions is not None:
        raise ValueError("bias: got a choice of keys with slot_positions, takes a cache in which slots are positions")
    if isinstance(bias, PooledKeys):
        parts = _pooled(q, k, mask, positions, where, visible, bias, scale)
        return parts if sinks is None else with_sinks(parts, sinks)
    v = v if v.shape[3] else k
    G, e = k.shape[2], v.shape[3]
    chooses, bias = (bias, None) if isinstance(bias, KeyChoice) else (None, bias)
    chooses = dataclasses.replace(chooses, queries=asked) if isinstance(chooses, TopBlocks) else chooses
    added = None if bias is None else bias(q.swapaxes(1, 2), positions[:, None, :, None])
    if added is not None and not callable(added):
        raise TypeError(f"bias: got a function that returns {type(added).__name__}, takes one of queries and their "
                        "positions that returns a function of keys and their positions, such as by_position(scores)")
    dtype, q = q.dtype, _folded(q, G)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def biases(keys: Array, where: Array) -> Array:       # where: positions of keys, [B or 1, G or 1, K]
        more = added(keys, where[:, :, None]) if added is not None else _by_head(far(keys, where), H)
        return jnp.broadcast_to(more, (B, H, W, where.shape[2])).reshape(B, G, -1, where.shape[2])

    far: Any = None
    wanted, mask = None, mask[:, None]
    if chooses is not None:
        mask, far, wanted = chooses.choose(k, mask[:, 0], positions, where, visible)
    if sliding is not None:
        mask = mask & (positions[:, :, None] - where[:, None, :] < sliding)[:, None]
    s = jnp.einsum("bgqd,bgkd->bgqk", q, k[..., :q.shape[3]], preferred_element_type=jnp.float32) * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = s if bias is None else s + biases(k, where[:, None])
    s = jnp.where(_by_head(mask, H), s.reshape(B, H, W, -1), MASKED).reshape(s.shape)
    top = s.max(-1, keepdims=True)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bgqk,bgkd->bgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    lse = (top + jnp.log(total))[..., 0]

    if visible is not None:
        given = q, visible.cache, visible.length, _repeated(positions, H // G), visible.held, scales, table
        part = _read("cache_attention", implementation, given,
                     dict(bias=None if bias is None and far is None else biases, wanted=wanted), scale=scale,
                     value_width=e, sliding=sliding, softcap=softcap)
        out, lse = merge((out, lse), part)
    if sinks is not None:
        scores = jnp.repeat(sinks.astype(jnp.float32), W).reshape(G, -1)
        out, lse = merge((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(scores, lse.shape)))
    return _unfolded(out.astype(dtype), W), _unfolded(lse, W)


def _pooled(q: Array, k: Array, mask: Array, positions: Array, where: Array, cached: CachedKeys | None,
            keys: PooledKeys, scale: float) -> tuple[Array, Array]:
    """Returns attention to the latest tokens and to pooled keys, as `PooledKeys` describes it, from queries
    `f[B, W, H, d]`, the window's keys `f[B, K, 1, D]` at positions `where` (`i32[B, K]`), and the cache or None."""
    B, W, H, d = q.shape
    near, far = keys.parts(k, mask, positions, where, cached)
    found = [_attention(q, own, own[..., :0], seen, positions, None, None, where, None, None, None, None, None,
                        None, scale=scale, sliding=sliding, softcap=None, bias=None, implementation="xla")
             for own, seen, sliding in near]
    for own, sliding, chosen in far:
        added, wanted = (None, None) if chosen is None else chosen[1:]
        bias = None if added is None else lambda k, at, added=added: jnp.broadcast_to(
            added(k, at), (B, H, W, at.shape[2])).reshape(B, 1, -1, at.shape[2])
        out, lse = reference.cache_attention(
            _folded(q, 1), own.cache, own.length, _repeated(positions, H), own.held, None, own.table, scale=scale,
            value_width=d, sliding=sliding, bias=bias, wanted=wanted, part=own.part)
        found.append((_unfolded(out.astype(q.dtype), W), _unfolded(lse, W)))
    return merge(*found)


def _prefix(q: Array, positions: Array, cache: Array, length: Array, scales: Array | None, table: Array | None, *,
            implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    """See `prefix_attention`."""
    B, W, H, d = q.shape
    N, G = length.shape[0], cache.shape[1]
    given = (_folded(q.reshape(N, -1, H, d), G), cache, length, _repeated(positions.reshape(N, -1), H // G), None,
             scales, table)
    out, lse = _read("cache_attention", implementation, given, {}, value_width=cache.shape[3] - d or d, **options)
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
    """Reshapes `[B, W, H, ...]` to `[B, G, H / G * W, ...]`, the queries of each key/value head."""
    B, W, H, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, W, heads, H // heads, *rest), 1, 3).reshape(B, heads, H // heads * W, *rest)


def _unfolded(x: Array, width: int) -> Array:
    """Reshapes `[B, G, H / G * W, ...]` to `[B, W, H, ...]`."""
    B, G, R, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, G, R // width, width, *rest), 3, 1).reshape(B, width, G * R // width, *rest)


def _by_head(x: Array, heads: int) -> Array:
    """Repeats `[B, n, W, K]` to `[B, H, W, K]`; with `n = 1` it is returned as it is."""
    return x if x.shape[1] == 1 else jnp.repeat(x, heads // x.shape[1], 1)


def _repeated(positions: Array, times: int) -> Array:
    """Repeats `[B, W]` to `[B, H / G * W]`."""
    B, W = positions.shape
    return jnp.broadcast_to(positions[:, None], (B, times, W)).reshape(B, -1)


def _held(cache: Array, table: Array | None, length: Array | None, cached: Array | None,
          held: Array | None) -> tuple[Array, Array | None]:
    """Returns the number of slots of each row to read, and the positions of the tokens in visible slots (None if slots
    are positions)."""
    slots = cache.shape[2] * (1 if table is None else table.shape[1])
    place = jnp.arange(slots, dtype=jnp.int32)
    if held is not None:
        length = jnp.where((held >= 0).any(1), place + 1, 0).max(1)
    assert length is not None
    if cached is not None:      # reading ends after the last entry that a row sees
        held = jnp.where(cached & (place < length[:, None]), place, -1)[:, None]
        length = jnp.where(held >= 0, place + 1, 0).max((1, 2))
    return length, held


def _read(name: str, implementation: Implementation | None, given: tuple[Array | None, ...], plain: dict[str, Any],
          **options: Any) -> Any:
    """Calls the function `name` of an implementation. `plain` has options that only the reference takes."""
    walk: Callable[..., Any] = functools.partial(getattr(reference, name), **options, **plain)
    if implementation == "xla":
        return walk(*given)
    # Import a kernel's module only if it is needed.
    kind = "gpu" if implementation == "triton" or (implementation is None and platform() == "gpu") else "tpu"
    module = importlib.import_module(f"decodax.pallas_kernels.window_attention.{kind}")
    kernel: Callable[..., Any] = functools.partial(getattr(module, name), **options)
    if implementation is None:
        return lax.platform_dependent(*given, **{"cuda" if kind == "gpu" else kind: kernel}, default=walk)
    return kernel(*given, interpret=platform() == "cpu")
