"""Attention of a window to a cache on TPUs (Mosaic).

A program instance handles a row, a tile of its queries and a block of its slots, with all heads. One transfer of `G x
block` entries, keys and values together, runs while the block before is computed. Instances outside of a row's live
blocks ask for a block that is already in fast memory, so nothing is transferred for them: for each row, only live
blocks are read. There is nearly always one tile; the queries of a wide chunk of a prompt are divided into several
tiles, each of which reads the cache.

`slot_weights` loops in the other order, with tiles inside of blocks, so that keys are read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
BLOCK_BYTES = 2 << 20
"""Bytes of one transfer: large enough to hide its start, small enough that two of them and the scores fit in a v4's 16
MiB."""

TILE_BYTES = 8 << 20
"""Maximum bytes of a tile's queries, sums and results; arrays that are transferred are counted twice."""

SCORES = 512 << 10
"""Maximum number of scores of a head, tile and block at a time: two to three float32 arrays of that size."""

TABLE_BYTES = 512 << 10
"""Maximum bytes of a table of pages: half of the scalar memory. A larger table takes several launches."""

MASKED = -1e30


def block_of(heads: int, slots: int, width: int, itemsize: int) -> int | None:
    """Returns the number of slots of a cache that one instance of the kernel reads: a divisor of `slots` and a multiple
    of the 128 lanes, or None if there is none. `width` is that of a slot's key and value, of `itemsize` bytes an entry.

    >>> block_of(8, 2048, 256, 2), block_of(1, 2048, 256, 2), block_of(8, 2000, 256, 2), block_of(8, 64, 256, 2)
    (512, 2048, None, None)
    """
    padded = -(-width // LANES) * LANES
    fits = [n for n in range(LANES, slots + 1, LANES) if slots % n == 0]
    small = [n for n in fits if heads * n * padded * itemsize <= BLOCK_BYTES]
    return max(small) if small else min(fits, default=None)


def tile_of(heads: int, rows: int, width: int, itemsize: int, block: int) -> int:
    """Returns the number of query rows of a head that one instance of the kernel computes: the `rows` in about equal
    parts, rounded up to a multiple of 16.

    >>> tile_of(8, 5, 128, 2, 512), tile_of(8, 128, 128, 2, 512), tile_of(8, 1024, 128, 2, 512)
    (16, 128, 256)
    >>> tile_of(8, 272, 128, 2, 512), tile_of(1, 1024, 128, 2, 4096)
    (144, 128)
    """
    padded = -(-width // LANES) * LANES
    each = heads * (2 * padded * itemsize + 3 * 4 * padded + 4 * 4 * LANES)
    most = max(min(TILE_BYTES // each, SCORES // block) // 16, 1)
    steps = -(-rows // 16)
    return -(-steps // -(-steps // most)) * 16


def cache_attention(q: Array, cache: Array, length: Array, positions: Array, held: Array | None = None,
                    scales: Array | None = None, table: Array | None = None, *, scale: float, value_width: int,
                    sliding: int | None = None, softcap: float | None = None, block: int | None = None,
                    tile: int | None = None, interpret: Any = False) -> tuple[Array, Array]:
    """Returns attention to a cache, `f32[B, G, R, e]`, and the logarithms of the softmax sums, `f32[B, G, R]`, by a TPU
    kernel. Arguments that are not listed are those of `reference.cache_attention`.

    Args:
        block: number of slots that an instance reads; None: `block_of`.
        tile: number of queries of a head for an instance, a multiple of 16; None: `tile_of`.
        interpret: whether to run without a TPU; True, or `pltpu.InterpretParams`.
    """
    R = q.shape[2]
    out, lse = _call(q, None, cache, length, positions, held, scales, table, scale=scale, sliding=sliding,
                     softcap=softcap, causal=False, block=block, tile=tile, interpret=interpret)
    return out[:, :, :R, -value_width:], lse[:, :, :R, 0]


def slot_weights(q: Array, lse: Array, cache: Array, length: Array, positions: Array, held: Array | None = None,
                 scales: Array | None = None, table: Array | None = None, *, scale: float, sliding: int | None = None,
                 softcap: float | None = None, causal: bool = False, block: int | None = None,
                 tile: int | None = None, interpret: Any = False) -> Array:
    """Returns the softmax weight that each cache slot receives, summed over the queries of a head, `f32[B, G, S]`, by a
    TPU kernel. Arguments that are not listed are those of `reference.slot_weights`.

    It reads the keys once more: half of the cache's bytes if widths are multiples of 128, otherwise all of them,
    because keys and values share lanes.

    Args:
        block, tile, interpret: see `cache_attention`.
    """
    return _call(q, lse, cache, length, positions, held, scales, table, scale=scale, sliding=sliding, softcap=softcap,
                 causal=causal, block=block, tile=tile, interpret=interpret)[0]


class _Place(NamedTuple):
    """The place of an instance in the grid.

    Attributes:
        b: the row.
        t: the tile of its queries.
        i: the step over its blocks.
        n: the block of its slots that the step reads.
        row: the row (or page) of the cache that holds the block.
        part: the index of the block within that row or page.
    """

    b: Any
    t: Any
    i: Any
    n: Any
    row: Any
    part: Any


def _call(q: Array, lse: Array | None, cache: Array, length: Array, positions: Array, held: Array | None,
          scales: Array | None, table: Array | None, *, scale: float, sliding: int | None, softcap: float | None,
          causal: bool, block: int | None, tile: int | None, interpret: Any) -> tuple[Array, ...]:
    """Returns the attention's output and the logarithms of its sums, with the padding of tiles; if `lse` is given, the
    slot weights."""
    B, G, R, d = q.shape
    page, D = cache.shape[2:]
    block = block or block_of(G, page, D, cache.dtype.itemsize)
    if block is None or page % block:
        kind = "slots" if table is None else "slots a page"
        raise ValueError(f"cache: got {page} {kind}, takes a multiple of the block of {block or LANES}")
    pages = 1 if table is None else table.shape[1]
    if table is not None and B > (most := max(TABLE_BYTES // (4 * pages), 1)):
        rows: Any = lambda x, i: None if x is None else x[i:i + most]
        some = [_call(rows(q, i), rows(lse, i), cache, rows(length, i), rows(positions, i), rows(held, i), scales,
                      rows(table, i), scale=scale, sliding=sliding, softcap=softcap, causal=causal, block=block,
                      tile=tile, interpret=interpret) for i in range(0, B, most)]
        return tuple(map(jnp.concatenate, zip(*some, strict=True)))
    S = pages * page
    split = d < D and d % LANES == 0 and D % LANES == 0     # keys and values begin at whole lanes
    # otherwise zeros are appended to queries, which meet the values; transfers and matrix passes cost the same
    width, out_width = (d, D - d) if split else (D, D)
    q = q if scales is not None else q.astype(cache.dtype)
    tile = tile or tile_of(G, R, max(width, out_width), q.dtype.itemsize, block)
    tiles, blocks = -(-R // tile), S // block
    more = tiles * tile - R
    if sliding is None or held is not None:
        first = jnp.zeros_like(length)
    else:
        first = jnp.maximum(positions.min(1) - sliding + 1, 0) // block
    last = jnp.maximum((length + block - 1) // block - 1, first)

    def spec(shape: tuple[int, ...], place: Callable[[_Place], tuple[Any, ...]]) -> pl.BlockSpec:
        def index(b: Array, x: Array, y: Array, first: Array, last: Array, length: Array, *tables: Array) -> Any:
            t, i = (x, y) if lse is None else (y, x)
            n = jnp.clip(i, first[b], last[b])
            if not tables:
                return place(_Place(b, t, i, n, b, n))
            parts = page // block
            return place(_Place(b, t, i, n, tables[0][b * pages + n // parts], n % parts))

        return pl.BlockSpec(shape, index)

    inputs = {
        "q": (jnp.pad(q, ((0, 0), (0, 0), (0, more), (0, width - d))),
              spec((1, G, tile, width), lambda at: (at.b, 0, at.t, 0))),
        "positions": (jnp.pad(positions, ((0, 0), (0, more)))[..., None],
                      spec((1, tile, 1), lambda at: (at.b, at.t, 0))),
        # Without the constraint the compiler may move the whole cache to fast memory and back, whatever is live.
        "cache": (cache if interpret else pltpu.with_memory_space_constraint(cache, pltpu.HBM),
                  spec((1, G, block, D if lse is None else width), lambda at: (at.row, 0, at.part, 0))),
    }
    if held is not None:
        inputs["held"] = held, spec((1, held.shape[1], block), lambda at: (at.b, 0, at.n))
    if scales is not None:
        inputs["scales"] = scales, spec((1, G, 2, block), lambda at: (at.row, 0, 0, at.part))
    if lse is None:
        grid: tuple[int, ...] = B, tiles, blocks
        results: list[Any] = [((B, G, tiles * tile, n), spec((1, G, tile, n), lambda at: (at.b, 0, at.t, 0)))
                              for n in (out_width, LANES)]
        scratch = [(G, tile, LANES), (G, tile, LANES), (G, tile, out_width)]
    else:
        grid = B, blocks, tiles
        inputs["lse"] = (jnp.pad(lse, ((0, 0), (0, 0), (0, more)), constant_values=jnp.inf)[..., None],
                         spec((1, G, tile, 1), lambda at: (at.b, 0, at.t, 0)))
        results = [((B, G, S), spec((1, G, block), lambda at: (at.b, 0, at.i)))]
        scratch = []
    # These are in scalar memory, and flat, because two axes would be padded there.
    scalars = [first, last, length, *(() if table is None else (jnp.maximum(table, 0).reshape(-1),))]
    arrays, in_specs = zip(*inputs.values(), strict=True)
    kernel = functools.partial(_kernel, scalars=len(scalars), inputs=tuple(inputs), scale=scale, sliding=sliding,
                               softcap=softcap, causal=causal, block=block, width=d if split else None)
    products = 2 if lse is None else 1
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=in_specs, out_specs=[where for _, where in results],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch]),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=2 * products * B * G * R * S * D, transcendentals=B * G * R * S,
                                      bytes_accessed=B * G * S * D * cache.dtype.itemsize),
        name="cache_attention" if lse is None else "slot_weights",
    )(*scalars, *arrays)


def _kernel(*refs: Array, scalars: int, inputs: tuple[str, ...], scale: float, sliding: int | None,
            softcap: float | None, causal: bool, block: int, width: int | None) -> None:
    """Runs one instance. `inputs` names the refs after the scalars; `width` is that of keys if values are read
    separately."""
    (first, _, length), refs = refs[:3], refs[scalars:]
    given, rest = dict(zip(inputs, refs, strict=False)), refs[len(inputs):]
    q, positions, cache = given["q"], given["positions"], given["cache"]
    held, scales = given.get("held"), given.get("scales")
    weighs = "lse" in given         # decides the order of the grid and the use of the scores
    b, i = pl.program_id(0), pl.program_id(1 if weighs else 2)
    heads, rows = q.shape[1:3]
    start = i * block
    live = (i >= first[b]) & (start < length[b])

    def scores(g: int) -> tuple[Array, Array, Array]:
        kv = cache[0, g].astype(q.dtype)
        keys = kv if width is None else kv[:, :width]
        s = lax.dot_general(q[0, g], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if scales is not None:
            s = s * scales[0, g].astype(jnp.float32)[:1]
        s = s * scale if softcap is None else softcap * jnp.tanh(s * scale / softcap)
        where = start + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        seen = where < length[b]
        if held is not None:
            where = jnp.broadcast_to(held[0, g if held.shape[1] > 1 else 0][None], (rows, block))
            seen = seen & (where >= 0)
        if sliding is not None:
            seen = seen & (positions[0] - where < sliding)
        if causal:
            seen = seen & (positions[0] >= where)
        return s, seen, kv

    if weighs:
        (weights,), sums = rest, given["lse"]

        @pl.when(pl.program_id(2) == 0)
        def none() -> None:
            weights[...] = jnp.zeros(weights.shape, jnp.float32)

        @pl.when(live)
        def weigh() -> None:
            for g in range(heads):
                s, seen, _ = scores(g)
                weights[0, g] += jnp.where(seen, jnp.exp(s - sums[0, g]), 0).sum(0)

        return

    out, lse, top, total, acc = rest        # of attention

    @pl.when(i == 0)
    def clear() -> None:
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(live)
    def look() -> None:
        for g in range(heads):
            s, seen, kv = scores(g)
            values = kv if width is None else kv[:, width:]
            s = jnp.where(seen, s, MASKED)
            before = top[g][:, :1]
            new = jnp.maximum(before, s.max(1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(s - new), 0)
            shrink = jnp.exp(before - new)
            top[g] = jnp.broadcast_to(new, top.shape[1:])
            total[g] = jnp.broadcast_to(total[g][:, :1] * shrink + weights.sum(1, keepdims=True), total.shape[1:])
            if scales is not None:
                weights = weights * scales[0, g].astype(jnp.float32)[1:]
            acc[g] = acc[g] * shrink + lax.dot_general(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())),
                                                       preferred_element_type=jnp.float32)

    @pl.when(i == pl.num_programs(2) - 1)
    def finish() -> None:
        for g in range(heads):
            divisor = total[g][:, :1]
            some = divisor != 0        # true for NaN, which must remain
            out[0, g] = jnp.where(some, acc[g] / jnp.where(some, divisor, 1), 0)
            whole = jnp.where(total[g] != 0, total[g], 1)
            lse[0, g] = jnp.where(total[g] != 0, top[g] + jnp.log(whole), MASKED)
