"""Attention of a window to a cache on GPUs (Triton).

A program handles a row, one of its key/value heads, a tile of that head's queries and a share of the row's live slots.
Decoding has few rows, so the slots are divided into shares until every multiprocessor has work (Dao et al., 2023,
"Flash-Decoding"), and the shares are merged by their softmax sums. A program ends at the last live slot.

Sizes were chosen by timing on an H200 (`docs/results/gpu.md`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from decodax.common.axes import compute_capability

MASKED = -1e30

BLOCK = 64
"""Number of slots that a program handles in a step."""

TILE = 64
"""Maximum number of queries of a head for a program: the number that a group of warps multiplies at once on Hopper."""

CORES = 2 * 132
"""Number of programs that an H100 or H200 runs at once: two on each multiprocessor, so that one reads while the other
waits."""

MOST_SHARES = 128

SHARED = {8.0: 163, 8.7: 163, 9.0: 227, 10.0: 227, 10.3: 227, 11.0: 227}
"""Shared memory that a program may use, in KiB, by compute capability; 99 for others from 8.0 on (NVIDIA, "CUDA C++
Programming Guide", technical specifications)."""


def shares_of(programs: int, steps: int, cores: int = CORES) -> int:
    """Returns the number of shares into which a row's slots are divided: the smallest number that keeps the GPU nearly
    as busy as the best number.

    Args:
        programs: the number of programs with one share.
        steps: the number of blocks of slots to divide.
        cores: the number of programs that run at once.

    >>> shares_of(8, 128), shares_of(64, 32), shares_of(256, 256), shares_of(1, 2)
    (29, 4, 1, 2)
    """
    def busy(shares: int) -> float:
        waves = programs * shares / cores
        return waves / math.ceil(waves)

    if programs >= 0.8 * cores:
        return 1
    possible = range(1, min(MOST_SHARES, steps) + 1)
    best = max(map(busy, possible))
    return next(shares for shares in possible if busy(shares) >= 0.85 * best)


def depth_of(block: int, slot: int, most: int, shared: int) -> tuple[int, int]:
    """Returns the number of slots that a step reads, and the number of steps that are read ahead of their use, so that
    they fit in shared memory.

    Args:
        block: maximum number of slots.
        slot: bytes that are read of one slot.
        most: maximum number of steps.
        shared: shared memory in KiB.

    >>> depth_of(64, 512, 3, 227), depth_of(64, 1024, 3, 163), depth_of(64, 2048, 3, 99)
    ((64, 3), (64, 2), (32, 1))
    """
    room = (shared - 16) << 10      # 16 KiB for queries and intermediate results
    while block > 16 and block * slot > room:
        block //= 2
    return block, max(1, min(most, room // (block * slot)))


def _shared() -> int:
    return SHARED.get(compute_capability(), 99)


def cache_attention(q: Array, cache: Array, length: Array, positions: Array, held: Array | None = None,
                    scales: Array | None = None, table: Array | None = None, *, scale: float, value_width: int,
                    sliding: int | None = None, softcap: float | None = None, block: int = BLOCK,
                    shares: int | None = None, interpret: bool = False) -> tuple[Array, Array]:
    """Returns attention to a cache, `f32[B, G, R, e]`, and the logarithms of the softmax sums, `f32[B, G, R]`, by a GPU
    kernel. Arguments that are not listed are those of `reference.cache_attention`.

    Args:
        block: number of slots in a step, a power of two from 16 on.
        shares: number of shares of a row's slots; None: `shares_of`.
        interpret: whether to run without a GPU.
    """
    B, G, R, _ = q.shape
    e, page = value_width, cache.shape[2]
    S = page * (1 if table is None else table.shape[1])
    tile = _power(min(R, TILE))
    block, stages = depth_of(block, cache.shape[3] * cache.dtype.itemsize, 3, _shared())
    tiles, steps = -(-R // tile), -(-S // block)
    n = shares or shares_of(B * G * tiles, steps)
    # Skip blocks at the front that a sliding layer no longer sees.
    first = jnp.zeros_like(length) if sliding is None or held is not None else jnp.maximum(
        positions.min(1) - sliding + 1, 0) // block
    q = q if scales is not None else q.astype(cache.dtype)
    names, arrays = _given(q=q, cache=cache, length=length, first=first, positions=positions, held=held, scales=scales,
                           table=table)
    kernel = functools.partial(_attend, names=names, heads=G, rows=R, tile=tile, block=block, shares=n, values=e,
                               scale=scale, sliding=sliding, softcap=softcap)
    out, lse = pl.pallas_call(
        kernel, grid=(B * G, tiles, n), interpret=interpret, name="cache_attention",
        # Shapes include the padding of tiles.
        out_shape=[jax.ShapeDtypeStruct((B, G, n, tiles * tile, _power(e)), jnp.float32),
                   jax.ShapeDtypeStruct((B, G, n, tiles * tile), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=2 if tile <= 32 else 4, num_stages=stages),
        cost_estimate=pl.CostEstimate(flops=4 * B * G * R * S * cache.shape[3], transcendentals=B * G * R * S,
                                      bytes_accessed=B * G * S * cache.shape[3] * cache.dtype.itemsize),
    )(*arrays)
    out, lse = out[:, :, :, :R, :e], lse[:, :, :, :R]
    top = lse.max(2)
    weights = jnp.exp(lse - top[:, :, None])
    total = weights.sum(2)
    return jnp.einsum("bgnre,bgnr->bgre", out, weights) / total[..., None], jnp.where(
        top > MASKED / 2, top + jnp.log(total), MASKED)


def slot_weights(q: Array, lse: Array, cache: Array, length: Array, positions: Array, held: Array | None = None,
                 scales: Array | None = None, table: Array | None = None, *, scale: float, sliding: int | None = None,
                 softcap: float | None = None, causal: bool = False, block: int = BLOCK,
                 interpret: bool = False) -> Array:
    """Returns the softmax weight that each cache slot receives, summed over the queries of a head, `f32[B, G, S]`, by a
    GPU kernel. Arguments are those of `reference.slot_weights`; `block` is the number of slots in a step, and
    `interpret` runs it without a GPU."""
    B, G, R, _ = q.shape
    page = cache.shape[2]
    S = page * (1 if table is None else table.shape[1])
    tile = _power(min(R, TILE))
    block, stages = depth_of(block, q.shape[3] * cache.dtype.itemsize, 2, _shared())
    q = q if scales is not None else q.astype(cache.dtype)
    names, arrays = _given(q=q, cache=cache, length=length, positions=positions, held=held, scales=scales, table=table,
                           lse=lse)
    kernel = functools.partial(_weigh, names=names, heads=G, rows=R, tile=tile, block=block, scale=scale,
                               sliding=sliding, softcap=softcap, causal=causal)
    return pl.pallas_call(
        kernel, grid=(B * G, -(-S // block)), interpret=interpret, name="slot_weights",
        out_shape=jax.ShapeDtypeStruct((B, G, -(-S // block) * block), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=stages),
    )(*arrays)[:, :, :S]


def _given(**arrays: Array | None) -> tuple[tuple[str, ...], list[Array]]:
    """Returns the names and the arrays of the arguments that are not None."""
    found = {name: array for name, array in arrays.items() if array is not None}
    return tuple(found), list(found.values())


def _power(n: int) -> int:
    """Returns the smallest power of two that is at least 16 and `n`; Triton multiplies only such sizes."""
    return max(16, 1 << (n - 1).bit_length())


def _both(rows: Array, col: Array, width: int) -> Array:
    """Returns a mask of the entries of some rows that exist, `bool[rows, columns]`. Columns are compared with `width`
    only if some are missing: Triton reads several entries at once if it can prove that neighbours are all read."""
    all_of_them = jnp.broadcast_to(rows[:, None], (len(rows), len(col)))
    return all_of_them if len(col) == width else all_of_them & (col < width)[None, :]


def _load(ref: Any, *index: Any, mask: Array) -> Array:
    return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


class _Row:
    """The data of a row and a key/value head, for a program.

    Attributes:
        b: the row.
        g: the head.
        length: number of live slots.
    """

    def __init__(self, given: dict[str, Any], heads: int, rows: int, block: int):
        self.given, self.rows, self.block = given, rows, block
        self.b, self.g = pl.program_id(0) // heads, pl.program_id(0) % heads
        self.length = given["length"][self.b]
        self.page, self.D = given["cache"].shape[2:]
        self.d = given["q"].shape[3]

    def queries(self, start: Array, tile: int) -> tuple[Array, Array, Array, Array]:
        """Returns the indices of a tile's queries, a mask of those that exist, their vectors and their positions."""
        row = start + jnp.arange(tile)
        there = row < self.rows
        col = jnp.arange(_power(self.d))
        q = _load(self.given["q"], self.b, self.g, jnp.where(there, row, 0)[:, None], col[None, :],
                  mask=_both(there, col, self.d))
        return row, there, q, _load(self.given["positions"], self.b, jnp.where(there, row, 0), mask=there)

    def slots(self, start: Array) -> tuple[Array, Array, Array, Array]:
        """Returns the slots of a block, a mask of the live ones, and their rows (or pages) and slots in the cache."""
        slot = start + jnp.arange(self.block)
        live = slot < self.length
        slot = jnp.where(live, slot, 0)
        if "table" not in self.given:
            return slot, live, jnp.broadcast_to(self.b, slot.shape), slot
        row = _load(self.given["table"], self.b, slot // self.page, mask=live)
        return slot, live, jnp.where(live, row, 0), slot % self.page

    def part(self, row: Array, place: Array, live: Array, begin: int, width: int) -> Array:
        """Returns keys or values of a block, `[block, power of two]`, with zeros for missing ones."""
        col = jnp.arange(_power(width))
        return _load(self.given["cache"], row[:, None], self.g, place[:, None], (begin + col)[None, :],
                     mask=_both(live, col, width))

    def factor(self, which: int, row: Array, place: Array, live: Array) -> Array:
        """Returns the scales of keys (0) or values (1), `f32[block]`."""
        return _load(self.given["scales"], row, self.g, which, place, mask=live).astype(jnp.float32)

    def scores(self, q: Array, positions: Array, start: Array, *, scale: float, sliding: int | None,
               softcap: float | None, causal: bool) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """Returns the scores of a block and a mask of the visible ones, `[tile, block]`, and the places of its values
        in the cache (rows, slots, live)."""
        slot, live, row, place = self.slots(start)
        s = _dot(q, self.part(row, place, live, 0, self.d).astype(q.dtype).T)
        if "scales" in self.given:
            s = s * self.factor(0, row, place, live)[None, :]
        s = s * scale if softcap is None else softcap * jnp.tanh(s * scale / softcap)
        where, seen = slot, live
        if "held" in self.given:
            held = self.given["held"]
            where = _load(held, self.b, self.g if held.shape[1] > 1 else 0, slot, mask=live)
            seen = live & (where >= 0)
        seen = jnp.broadcast_to(seen[None, :], s.shape)
        if sliding is not None:
            seen = seen & (positions[:, None] - where[None, :] < sliding)
        if causal:
            seen = seen & (positions[:, None] >= where[None, :])
        return s, seen, (row, place, live)


def _dot(a: Array, b: Array) -> Array:
    """Returns the product in float32, without the rounding of float32 operands to 10 bits that tensor cores do by
    default."""
    return lax.dot(a, b, preferred_element_type=jnp.float32,
                   precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def _attend(*refs: Any, names: tuple[str, ...], heads: int, rows: int, tile: int, block: int, shares: int, values: int,
            **options: Any) -> None:
    given, (out, lse) = dict(zip(names, refs, strict=False)), refs[len(names):]
    here = _Row(given, heads, rows, block)
    p = pl.program_id(2)
    start = pl.program_id(1) * tile
    _, _, q, positions = here.queries(start, tile)
    first, end = given["first"][here.b], (here.length + block - 1) // block
    each = (jnp.maximum(end - first, 0) + shares - 1) // shares
    begin = first + p * each

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        s, seen, at = here.scores(q, positions, i * block, causal=False, **options)
        s = jnp.where(seen, s, MASKED)
        new = jnp.maximum(top, s.max(1))
        weights, shrink = jnp.where(seen, jnp.exp(s - new[:, None]), 0), jnp.exp(top - new)
        total = total * shrink + weights.sum(1)
        if "scales" in given:
            weights = weights * here.factor(1, *at)[None, :]
        kv = here.part(*at, here.d, values).astype(q.dtype)
        return new, total, acc * shrink[:, None] + _dot(weights.astype(kv.dtype), kv)

    width = _power(values)
    nothing = (jnp.full(tile, MASKED, jnp.float32), jnp.zeros(tile, jnp.float32), jnp.zeros((tile, width), jnp.float32))
    top, total, acc = lax.fori_loop(begin, jnp.minimum(begin + each, end), step, nothing)
    some = total != 0           # true for NaN, which must remain
    whole = jnp.where(some, total, 1)
    out[here.b, here.g, p, pl.ds(start, tile)] = jnp.where(some[:, None], acc / whole[:, None], 0)
    lse[here.b, here.g, p, pl.ds(start, tile)] = jnp.where(some, top + jnp.log(whole), MASKED)


def _weigh(*refs: Any, names: tuple[str, ...], heads: int, rows: int, tile: int, block: int, **options: Any) -> None:
    given, (weights,) = dict(zip(names, refs, strict=False)), refs[len(names):]
    here = _Row(given, heads, rows, block)
    start = pl.program_id(1) * block

    def step(t: Array, total: Array) -> Array:
        row, there, q, positions = here.queries(t * tile, tile)
        sums = _load(given["lse"], here.b, here.g, jnp.where(there, row, 0), mask=there)
        s, seen, _ = here.scores(q, positions, start, **options)
        return total + jnp.where(seen & there[:, None], jnp.exp(s - sums[:, None]), 0).sum(0)

    tiles = (start < here.length).astype(jnp.int32) * -(-rows // tile)      # `where` of two scalars does not lower
    total = lax.fori_loop(0, tiles, step, jnp.zeros(block, jnp.float32))
    weights[here.b, here.g, pl.ds(start, block)] = total
