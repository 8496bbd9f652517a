"""Attention of a window to what a cache holds, as a kernel for TPUs (Mosaic).

A program instance is a row and a block of its slots, with all heads: one transfer of `G x block` entries, keys and
values side by side, while the block before it is computed. A row's instances behind its last live block ask for the
block that is already there, so that nothing is transferred for them: each row reads what it holds, and no more.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
BLOCK_BYTES = 2 << 20
"""Of one transfer: large enough to hide its start, small enough that two and the scores fit the 16 MiB of a v4."""

MASKED = -1e30


def block_of(heads: int, slots: int, width: int, itemsize: int) -> int | None:
    """Slots that an instance reads: a divisor of `slots` and a multiple of the lanes; None if there is none.

    >>> block_of(8, 2048, 256, 2), block_of(1, 2048, 256, 2), block_of(8, 2000, 256, 2), block_of(8, 64, 256, 2)
    (512, 2048, None, None)
    """
    padded = -(-width // LANES) * LANES
    fits = [n for n in range(LANES, slots + 1, LANES) if slots % n == 0]
    small = [n for n in fits if heads * n * padded * itemsize <= BLOCK_BYTES]
    return max(small) if small else min(fits, default=None)


def cache_attention(q: Array, cache: Array, length: Array, positions: Array, held: Array | None = None, *,
                    scale: float, value_width: int, sliding: int | None = None, softcap: float | None = None,
                    block: int | None = None, interpret: Any = False) -> tuple[Array, Array]:
    """As `reference.cache_attention`.

    Args:
        block: slots that an instance reads; default `block_of`.
        interpret: run without a TPU; True, or `pltpu.InterpretParams`.
    """
    B, G, R, d = q.shape
    S, D = cache.shape[2:]
    block = block or block_of(G, S, D, cache.dtype.itemsize)
    if block is None or S % block:
        raise ValueError(f"cache: got {S} slots, takes a multiple of the block of {block or LANES}")
    split = d % LANES == 0 and D % LANES == 0       # keys and values begin at whole lanes
    # else queries are widened by zeros, which meet the values; the transfers and the passes of the matrix unit stay
    rows = -(-R // 16) * 16
    q = jnp.pad(q.astype(cache.dtype), ((0, 0), (0, 0), (0, rows - R), (0, 0 if split else D - d)))
    positions = jnp.pad(positions, ((0, 0), (0, rows - R)))[..., None]
    blocks = S // block
    if sliding is None or held is not None:
        first = jnp.zeros_like(length)
    else:
        first = jnp.maximum(positions[:, :R, 0].min(1) - sliding + 1, 0) // block
    last = jnp.maximum((length + block - 1) // block - 1, first)

    def at(b: Array, i: Array, first: Array, last: Array, length: Array) -> Array:
        return jnp.minimum(first[b] + i, last[b])

    out_width = D - d if split else D
    in_specs = [
        pl.BlockSpec((1, G, rows, q.shape[3]), lambda b, i, *_: (b, 0, 0, 0)),
        pl.BlockSpec((1, rows, 1), lambda b, i, *_: (b, 0, 0)),
        pl.BlockSpec((1, G, block, D), lambda b, i, *refs: (b, 0, at(b, i, *refs), 0)),
    ]
    if not interpret:       # else the compiler may move it to fast memory and back, as a whole, whatever is live
        cache = pltpu.with_memory_space_constraint(cache, pltpu.HBM)
    arrays = [q, positions, cache]
    if held is not None:
        in_specs.append(pl.BlockSpec((1, held.shape[1], block), lambda b, i, *refs: (b, 0, at(b, i, *refs))))
        arrays.append(held)
    kernel = functools.partial(_kernel, scale=scale, sliding=sliding, softcap=softcap, block=block, blocks=blocks,
                               heads=G, width=d, split=split, held=held is not None)
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(B, blocks), in_specs=in_specs,
            out_specs=[pl.BlockSpec((1, G, rows, out_width), lambda b, i, *_: (b, 0, 0, 0)),
                       pl.BlockSpec((1, G, rows, LANES), lambda b, i, *_: (b, 0, 0, 0))],
            scratch_shapes=[pltpu.VMEM((G, rows, LANES), jnp.float32), pltpu.VMEM((G, rows, LANES), jnp.float32),
                            pltpu.VMEM((G, rows, out_width), jnp.float32)]),
        out_shape=[jax.ShapeDtypeStruct((B, G, rows, out_width), jnp.float32),
                   jax.ShapeDtypeStruct((B, G, rows, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=4 * B * G * R * S * D, bytes_accessed=cache.size * cache.dtype.itemsize,
                                      transcendentals=B * G * R * S),
        name="cache_attention",
    )(first, last, length, *arrays)
    return out[:, :, :R, -value_width:], lse[:, :, :R, 0]


def _kernel(first: Array, last: Array, length: Array, q: Array, positions: Array, cache: Array, *rest: Array,
            scale: float, sliding: int | None, softcap: float | None, block: int, blocks: int, heads: int, width: int,
            split: bool, held: bool) -> None:
    slots, rest = (rest[0], rest[1:]) if held else (None, rest)
    out, lse, top, total, acc = rest
    b, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    start = (first[b] + i) * block

    @pl.when(start < length[b])
    def _() -> None:
        rows = q.shape[2]
        at = start + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        for g in range(heads):
            kv = cache[0, g]
            keys, values = (kv[:, :width], kv[:, width:]) if split else (kv, kv)
            s = lax.dot_general(q[0, g], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            s = s * scale if softcap is None else softcap * jnp.tanh(s * scale / softcap)
            where, seen = at, at < length[b]
            if slots is not None:
                where = jnp.broadcast_to(slots[0, g if slots.shape[1] > 1 else 0][None], (rows, block))
                seen = seen & (where >= 0)
            if sliding is not None:
                seen = seen & (positions[0] - where < sliding)
            s = jnp.where(seen, s, MASKED)
            before = top[g][:, :1]
            new = jnp.maximum(before, s.max(1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(s - new), 0)
            shrink = jnp.exp(before - new)
            top[g] = jnp.broadcast_to(new, top.shape[1:])
            total[g] = jnp.broadcast_to(total[g][:, :1] * shrink + weights.sum(1, keepdims=True), total.shape[1:])
            acc[g] = acc[g] * shrink + lax.dot_general(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())),
                                                       preferred_element_type=jnp.float32)

    @pl.when(i == blocks - 1)
    def _() -> None:
        for g in range(heads):
            sums = total[g][:, :1]
            some = sums != 0        # true of a NaN, which must stay one
            out[0, g] = jnp.where(some, acc[g] / jnp.where(some, sums, 1), 0)
            whole = jnp.where(total[g] != 0, total[g], 1)
            lse[0, g] = jnp.where(total[g] != 0, top[g] + jnp.log(whole), MASKED)
