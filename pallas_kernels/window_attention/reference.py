"""Attention to a cache in plain XLA: a loop over blocks of slots with a running softmax.

The loop ends at the longest live row, so the time of a step depends on the length of the texts, not on the capacity
(125M Llama shape, CPU: the same time at capacity 256 and 4,096; one einsum over the capacity takes four times as long
at 1,024). The running softmax is that of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

Carry = TypeVar("Carry")

BLOCK = 128
"""Number of cache entries in a step of the loop. On CPU 128 to 512 take the same time for long rows, but short rows
read a complete step: with 56 live entries in a cache of 256, a step of 8 rows of the 125M shape takes 15% longer with
256 than with 128."""


def whole_blocks(slots: int, block: int = BLOCK) -> int:
    """Returns the number of slots, rounded up to whole blocks if it is above one block. A walk takes whole blocks.

    >>> whole_blocks(100), whole_blocks(129)
    (100, 256)
    """
    return slots if slots <= block else -(-slots // block) * block

WIDE_BLOCK = 1024
"""Number of cache entries in a step on accelerators, where a step is a dozen operations of a microsecond each: with
2,048 live entries, XLA estimates a third of the cycles of blocks of 256 on a v5e (`docs/results/tpu.md`)."""

MASKED = -1e30
"""The score of an invisible entry: finite, so that a fully masked block gives weights that the merge scales to zero."""


def block_of(slots: int, most: int) -> int:
    """Returns the size of the blocks, at most `most` entries, in which a cache with `slots` entries is read.

    >>> block_of(64, BLOCK), block_of(768, BLOCK), block_of(768, WIDE_BLOCK), block_of(3072, WIDE_BLOCK)
    (64, 128, 768, 1024)
    """
    return slots if slots <= most else math.gcd(most, slots)


class AttentionBlock(NamedTuple):
    """The data of one step of the loop.

    Attributes:
        at: first slot of the block.
        scores: `f32[B, G, R, block]`.
        seen: True for visible scores, in the shape of `scores` or broadcastable to it.
        values: `f[B, G, block, e]`.
        worth: factors of the values, `f32[B, G, 1, block]`; None: 1.
    """

    at: Array
    scores: Array
    seen: Array
    values: Array
    worth: Array | None


def cache_attention(q: Array, cache: Array, length: Array, positions: Array, held: Array | None = None,
                    scales: Array | None = None, table: Array | None = None, *, scale: float, value_width: int,
                    sliding: int | None = None, softcap: float | None = None,
                    bias: Callable[[Array, Array], Array] | None = None,
                    wanted: Array | None = None, part: tuple[int, int] | None = None) -> tuple[Array, Array]:
    """Returns attention to a cache, and the logarithm of each query's softmax sum.

    Args:
        q: `f[B, G, R, d]`, queries of each key/value head; keys may have further entries after the first `d`.
        cache: `f[B, G, S, d + e]`, the key and then the value of each slot; or `f[B, G, S, d]`, keys that are values,
            too.
        length: `i32[B]`; slots from this index on are invisible.
        positions: `i32[B, R]`, positions of the queries; used by `sliding`.
        held: `i32[B, G or 1, S]`, position of each slot's token, -1 for an invisible slot; None: slots are positions.
        scales: `f[B, G, 2, S]`, factors of each slot's key and value, for a cache of integers.
        table: `i32[B, N]`, the pages of each row, for a cache `f[P, G, page, d + e]` and scales `f[P, G, 2, page]` that
            all rows share; `S` is `N * page`. Entries for pages beyond `length` may be any number.
        scale, sliding, softcap: see `window_attention`.
        value_width: width of values, `e`.
        bias: maps keys `f[B, G, K, d]` and their positions, `i32[B or 1, G or 1, K]`, to numbers that are added to
            their scores, `f32[B, G, R, K]`.
        wanted: `bool[S]`, slots that count for some query; blocks without one are not read. None: all.
        part: first channel and number of the channels of a slot that are its key and its value; None: see `cache`.

    Returns:
        `f32[B, G, R, e]` and `f32[B, G, R]`; zeros and about -1e30 for a query that attends to nothing.
    """
    B, G, R, _ = q.shape

    def visit(x: AttentionBlock, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        new = jnp.maximum(top, x.scores.max(-1, keepdims=True))
        shrink, weights = jnp.exp(top - new), jnp.where(x.seen, jnp.exp(x.scores - new), 0)
        total = total * shrink + weights.sum(-1, keepdims=True)
        weights = (weights if x.worth is None else weights * x.worth).astype(x.values.dtype)
        more = jnp.einsum("bgqk,bgkd->bgqd", weights, x.values, preferred_element_type=jnp.float32)
        return new, total, out * shrink + more

    none = jnp.zeros((B, G, R, 1), jnp.float32)
    start = none + MASKED, none, jnp.zeros((B, G, R, value_width), jnp.float32)
    top, total, out = _walk(visit, start, q, cache, length, positions, held, scales, table, scale=scale,
                            sliding=sliding, softcap=softcap, bias=bias, wanted=wanted, value_width=value_width,
                            part=part)
    some = total != 0       # true for NaN, which must remain
    total = jnp.where(some, total, 1)
    return jnp.where(some, out / total, 0), jnp.where(some, top + jnp.log(total), MASKED)[..., 0]


def slot_weights(q: Array, lse: Array, cache: Array, length: Array, positions: Array, held: Array | None = None,
                 scales: Array | None = None, table: Array | None = None, *, scale: float, sliding: int | None = None,
                 softcap: float | None = None, causal: bool = False) -> Array:
    """Returns the weight `exp(score - lse)` that each slot receives, summed over the queries of a head: `f32[B, G, S]`.

    Args:
        lse: `f32[B, G, R]`, the logarithm of each query's softmax sum over all keys that it attends to; inf for a query
            that does not count.
        causal: whether a query does not attend to tokens after its own position.
        q, cache, length, positions, held, scales, table, scale, sliding, softcap: see `cache_attention`.
    """

    def visit(x: AttentionBlock, sums: Array) -> Array:
        weights = jnp.where(x.seen, jnp.exp(x.scores - lse[..., None]), 0).sum(2)
        return lax.dynamic_update_slice_in_dim(sums, weights, x.at, 2)

    slots = cache.shape[2] * (1 if table is None else table.shape[1])
    unit = _unit(cache, table)
    start = jnp.zeros((q.shape[0], cache.shape[1], -(-slots // unit) * unit), jnp.float32)
    return _walk(visit, start, q, cache, length, positions, held, scales, table, scale=scale, sliding=sliding,
                 softcap=softcap, causal=causal)[..., :slots]


def by_block(visit: Callable[[AttentionBlock, Array], Array], start: Callable[[int], Array], q: Array, cache: Array,
             length: Array, held: Array | None, scales: Array | None, table: Array | None,
             part: tuple[int, int] | None = None) -> Array:
    """Loops over the blocks of slots of a cache, computes the products of queries and keys in each, and updates an
    array by them: `array = visit(block, array)`.

    Args:
        visit: returns the next array, `[..., S']`.
        start: returns the first array for a number of slots, which may be more than `S`.
        q, cache, length, held, scales, table, part: see `cache_attention`.

    Returns:
        The last array, cut to `[..., S]`.
    """
    slots = cache.shape[2] * (1 if table is None else table.shape[1])
    unit = _unit(cache, table)
    positions = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
    return _walk(visit, start(-(-slots // unit) * unit), q, cache, length, positions, held, scales, table,
                 scale=1.0, sliding=None, softcap=None, part=part)[..., :slots]


def block_maxima(q: Array, cache: Array, length: Array, held: Array | None, scales: Array | None, table: Array | None,
                 *, size: int, first: int = 0) -> Array:
    """Returns the largest product of each query with the visible keys of each `size` slots, `f32[B, G', R, S / size]`
    (rounded up); minus infinity where none is visible.

    Args:
        q: `f[B, G', R, e]`, queries of the first `G'` heads.
        cache, length, held, scales, table: see `cache_attention`.
        size: number of slots of a block, any number.
        first: index of the first of the `e` entries of a key that are multiplied.
    """
    unit = _unit(cache, table)
    slots = cache.shape[2] * (1 if table is None else table.shape[1])
    full = -(-slots // unit) * unit
    # Each step pools this many slots, so that scores of single slots are nowhere for long.
    each = math.gcd(size, *(unit * block_of(full // unit, max(most // unit, 1)) for most in (BLOCK, WIDE_BLOCK)))

    def visit(x: AttentionBlock, found: Array) -> Array:
        own = jnp.where(x.seen, x.scores, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(found, own.reshape(*own.shape[:3], -1, each).max(-1), x.at // each, 3)

    positions = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
    found = _walk(visit, jnp.full((*q.shape[:3], full // each), -jnp.inf), q, cache, length, positions, held, scales,
                  table, scale=1.0, sliding=None, softcap=None, part=(first, q.shape[3]))
    more = -found.shape[3] % (size // each)
    found = jnp.pad(found, ((0, 0),) * 3 + ((0, more),), constant_values=-jnp.inf)
    return found.reshape(*found.shape[:3], -1, size // each).max(-1)[..., :-(-slots // size)]


def _unit(cache: Array, table: Array | None) -> int:
    """Returns a number of slots; blocks are multiples of it. With pages, it is the number of slots of whole pages that
    make up a block on CPU."""
    page = cache.shape[2]
    return 1 if table is None else page * max(BLOCK // page, 1)


def _walk(visit: Callable[[AttentionBlock, Carry], Carry], start: Carry, q: Array, cache: Array, length: Array,
          positions: Array, held: Array | None, scales: Array | None, table: Array | None, *, scale: float,
          sliding: int | None, softcap: float | None, causal: bool = False,
          bias: Callable[[Array, Array], Array] | None = None, wanted: Array | None = None,
          part: tuple[int, int] | None = None, value_width: int = 0) -> Carry:
    """Visits the scores of block after block: `carry = visit(block, carry)`."""
    d, page, unit = q.shape[3], cache.shape[2], _unit(cache, table)
    if table is None:
        slots = page
        if slots > BLOCK and slots % BLOCK and part is None:
            raise ValueError(f"cache: got {slots} slots, takes at most {BLOCK} or a multiple of {BLOCK}")
    else:
        more = -table.shape[1] % (unit // page)
        table = jnp.pad(jnp.maximum(table, 0), ((0, 0), (0, more)))
        held = held if held is None else jnp.pad(held, ((0, 0), (0, 0), (0, more * page)), constant_values=-1)
        slots = table.shape[1] * page

    def read(x: Array, i: Array, block: int, axis: int, part: tuple[int, int] | None = None) -> Array:
        """Returns block `i` of an array whose axis of slots is `axis`; of the channels of a cache those in `part`."""
        if table is None and part is not None:
            return lax.dynamic_slice(x, (0, 0, i * block, part[0]), (*x.shape[:2], block, part[1]))
        if table is None:
            return lax.dynamic_slice_in_dim(x, i * block, block, axis)
        numbers = lax.dynamic_slice_in_dim(table, i * (block // page), block // page, 1)
        pages = jnp.moveaxis(jnp.take(x, numbers, axis=0), 1, axis)
        pages = pages.reshape(*pages.shape[:axis], block, *pages.shape[axis + 2:])
        return pages if part is None else lax.slice_in_dim(pages, part[0], sum(part), axis=3)

    def walk(block: int, cache: Array, length: Array) -> Carry:
        def step(i: Array, carry: Carry) -> Carry:
            both = read(cache, i, block, 2, part)[:, :q.shape[1]]
            worth = None
            if scales is not None:
                both = both.astype(q.dtype)
                each = read(scales, i, block, 3)[:, :q.shape[1]].astype(jnp.float32)
                key_scales, worth = each[:, :, :1], each[:, :, 1:]
            keys = both[..., :d]
            values = both[..., both.shape[-1] - value_width:]
            at = i * block + jnp.arange(block, dtype=jnp.int32)
            seen, where = (at < length[:, None])[:, None], at[None, None]       # [B, G or 1, block]
            if held is not None:
                where = lax.dynamic_slice_in_dim(held, i * block, block, 2)
                seen = seen & (where >= 0)
            seen, behind = seen[:, :, None], positions[:, None, :, None] - where[:, :, None]
            if sliding is not None:
                seen = seen & (behind < sliding)
            if causal:
                seen = seen & (behind >= 0)
            s = jnp.einsum("bgqd,bgkd->bgqk", q, keys, preferred_element_type=jnp.float32) * scale
            s = s if scales is None else s * key_scales
            s = s if softcap is None else softcap * jnp.tanh(s / softcap)
            if bias is not None:
                s = s + bias(keys if scales is None else keys * key_scales.swapaxes(2, 3), where)
            s = jnp.where(seen, s, MASKED)
            return visit(AttentionBlock(i * block, s, seen, values, worth), carry)

        begin: Array | int = 0
        if sliding is not None and held is None:
            begin = jnp.maximum(jnp.min(positions) - sliding + 1, 0) // block
        end = (jnp.max(length) + block - 1) // block
        if wanted is None:
            return lax.fori_loop(begin, end, step, start)
        some = jnp.pad(wanted, (0, slots - wanted.shape[0])).reshape(-1, block).any(1)
        some = some & (jnp.arange(slots // block) >= begin) & (jnp.arange(slots // block) < end)
        order = jnp.argsort(~some, stable=True).astype(jnp.int32)
        return lax.fori_loop(0, some.sum(dtype=jnp.int32), lambda i, carry: step(order[i], carry), start)

    narrow, wide = (unit * block_of(slots // unit, max(most // unit, 1)) for most in (BLOCK, WIDE_BLOCK))
    return walk(narrow, cache, length) if narrow == wide else lax.platform_dependent(
        cache, length, cpu=functools.partial(walk, narrow), default=functools.partial(walk, wide))
