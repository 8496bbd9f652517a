"""Window attention in plain XLA: softmax over the window's own keys, merged with a walk over the cache's blocks.

The walk ends at the longest live row, so a step costs what is in the cache, not what would fit (125M Llama shape, CPU:
the same time at capacity 256 and 4,096; one einsum over the capacity takes four times as long at 1,024). The merge is
the online softmax of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn import logsumexp
from jax.sharding import PartitionSpec as P

from decodax.axes import DATA, MODEL, shardwise

Carry = tuple[Array, Array, Array]

Bias = Callable[[Array, Array], Array]
"""What is added to the scores, from positions alone: those of the queries `i32[B, 1, W, 1]` and of the keys
`i32[B or 1, G or 1, 1, K]` (apart for each key/value head where a cache keeps other tokens in each) to
`f32[B or 1, H or 1, W, K]`."""

BLOCK = 128
"""Cache entries a step of the walk. On CPU 128 to 512 measure alike for long rows; short ones read a whole step: with
56 live entries in a cache of 256, 8 rows of the 125M shape take 15% longer a step with 256 than with 128."""

WIDE_BLOCK = 1024
"""The same on accelerators, where a step is a dozen operations of a microsecond each: with 2,048 live entries XLA
estimates a third of the cycles that blocks of 256 take on a v5e (`docs/tpu.md`)."""

MASKED = -1e30
"""The score of what is not seen: finite, so that a fully masked block gives weights that the merge scales to zero."""


def block_of(slots: int, most: int) -> int:
    """The block of at most `most` entries in which a cache of `slots` is walked.

    >>> block_of(64, BLOCK), block_of(768, BLOCK), block_of(768, WIDE_BLOCK), block_of(3072, WIDE_BLOCK)
    (64, 128, 768, 1024)
    """
    return slots if slots <= most else math.gcd(most, slots)


def window_attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                     length: Array | None = None, *, scale: float,
                     sliding: int | None = None, softcap: float | None = None,
                     key_positions: Array | None = None, cached: Array | None = None,
                     slot_positions: Array | None = None, bias: Bias | None = None) -> Array:
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
        bias: what is added to the scores, after softcap: relative position biases (T5), slopes (ALiBi).

    Returns:
        `f[B, W, H, e]` in the dtype of `q`. Scores and sums are float32.
    """
    return window_attention_lse(q, k, v, mask, positions, cache, length, scale=scale, sliding=sliding,
                                softcap=softcap, key_positions=key_positions, cached=cached,
                                slot_positions=slot_positions, bias=bias)[0]


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to several sets of keys as attention to all of them. Each part, and the result, is what
    `window_attention_lse` gives."""
    outs, sums = (jnp.stack(x) for x in zip(*parts, strict=True))
    lse = logsumexp(sums, axis=0)
    return (outs * jnp.exp(sums - lse)[..., None]).sum(0).astype(outs.dtype), lse


def window_attention_lse(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                         length: Array | None = None, *, scale: float,
                         sliding: int | None = None, softcap: float | None = None,
                         key_positions: Array | None = None, cached: Array | None = None,
                         slot_positions: Array | None = None, bias: Bias | None = None) -> tuple[Array, Array]:
    """As `window_attention`, with the logarithm of each query's softmax sum, `f32[B, W, H]`: the weight of a key with
    score `s` is `exp(s - lse)`, and `merge` adds attention to other keys. About -1e30 where a query sees nothing."""
    arrays = q, k, v, mask, positions, cache, length, key_positions, cached, slot_positions
    if bias is not None:        # it closes over weights: no static value, and made for all heads
        return _attention(*arrays, scale=scale, sliding=sliding, softcap=softcap, bias=bias)
    return _attention_once(*arrays, scale=scale, sliding=sliding, softcap=softcap)


# traced and lowered once for all layers of a kind
@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap"))
def _attention_once(*arrays: Any, **options: Any) -> tuple[Array, Array]:
    q, _, _, mask, _, _, _, _, _, slot_positions = arrays
    heads, rows = P(DATA, None, MODEL), P(DATA)
    cache = P(DATA, MODEL)
    slots = P(DATA, MODEL if slot_positions is not None and slot_positions.shape[1] > 1 else None)
    specs = (heads, heads, heads, rows if mask.shape[0] == q.shape[0] else P(), rows, cache, rows, rows, rows, slots)
    return shardwise(functools.partial(_attention, bias=None, **options), specs, (heads, heads), *arrays)


def _attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None, length: Array | None,
               key_positions: Array | None, cached: Array | None, slot_positions: Array | None, *, scale: float,
               sliding: int | None, softcap: float | None, bias: Bias | None) -> tuple[Array, Array]:
    """See `window_attention_lse`."""
    B, W, H, d = q.shape
    G, e = k.shape[2], v.shape[3]
    q = q.reshape(B, W, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * W, d)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def scores(keys: Array, where: Array) -> Array:       # where [B or 1, G or 1, K], the keys' positions
        s = jnp.einsum("bgqd,bgkd->bgqk", q, keys, preferred_element_type=jnp.float32) * scale
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        if bias is None:
            return s
        more = bias(positions[:, None, :, None], where[:, :, None])
        return (s.reshape(B, H, W, -1) + more).reshape(s.shape)

    def seen(s: Array, allowed: Array) -> Array:      # allowed [B or 1, G or 1, W or 1, K], the same within a group
        by_head = s.reshape(B, G, H // G, W, -1)
        return jnp.where(allowed[:, :, None], by_head, MASKED).reshape(s.shape)

    def mix(weights: Array, values: Array) -> Array:
        return jnp.einsum("bgqk,bgkd->bgqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    where = positions if key_positions is None else key_positions
    if sliding is not None:
        mask = mask & (positions[:, :, None] - where[:, None, :] < sliding)
    s = seen(scores(k, where[:, None]), mask[:, None])
    top = s.max(-1, keepdims=True)
    weights = jnp.exp(s - top)
    total, out = weights.sum(-1, keepdims=True), mix(weights, v)

    blind = cached is not None and cached.shape[1] == 0
    if cache is not None and cache.shape[2] and not blind:
        slots = cache.shape[2]
        if slot_positions is not None:
            length = jnp.where((slot_positions >= 0).any(1), jnp.arange(1, slots + 1, dtype=jnp.int32), 0).max(1)
        assert length is not None
        if cached is not None:      # the walk ends behind the last entry that some row sees
            cached = cached & (jnp.arange(slots, dtype=jnp.int32) < length[:, None])
            length = jnp.where(cached.any(1), slots - jnp.argmax(cached[:, ::-1], 1), 0).astype(jnp.int32)
        if slots > BLOCK and slots % BLOCK:
            raise ValueError(f"a cache of {slots} slots is not a multiple of the block of {BLOCK}")

        def walk(block: int, carry: Carry, cache: Array, length: Array) -> Carry:
            def visit(i: Array, carry: Carry) -> Carry:
                top, total, out = carry
                both = lax.dynamic_slice_in_dim(cache, i * block, block, 2)
                keys, values = both[..., :d], both[..., d:]
                slots = (i * block + jnp.arange(block, dtype=jnp.int32))[None, None]       # [B or 1, G or 1, block]
                if slot_positions is not None:
                    slots = lax.dynamic_slice_in_dim(slot_positions, i * block, block, 2)
                    held = slots >= 0
                elif cached is not None:
                    held = lax.dynamic_slice_in_dim(cached, i * block, block, 1)[:, None]
                else:
                    held = slots < length[:, None, None]
                allowed = held[:, :, None]
                if sliding is not None:
                    allowed = allowed & (positions[:, None, :, None] - slots[:, :, None] < sliding)
                s = seen(scores(keys, slots), allowed)
                new = jnp.maximum(top, s.max(-1, keepdims=True))
                shrink, weights = jnp.exp(top - new), jnp.exp(s - new)
                return new, total * shrink + weights.sum(-1, keepdims=True), out * shrink + mix(weights, values)

            first: Array | int = 0
            if sliding is not None and slot_positions is None:
                first = jnp.maximum(jnp.min(positions) - sliding + 1, 0) // block
            last = (jnp.max(length) + block - 1) // block
            return lax.fori_loop(first, last, visit, carry)

        import os
        if os.environ.get("KERNEL"):
            from decodax.pallas_kernels.window_attention.tpu import cache_attention
            held = slot_positions
            if held is None and cached is not None:
                held = jnp.where(cached, jnp.arange(slots, dtype=jnp.int32), -1)[:, None]
            at = jnp.broadcast_to(positions[:, None], (B, H // G, W)).reshape(B, -1)
            o, l = cache_attention(q, cache, length, at, held, scale=scale, value_width=e, sliding=sliding, softcap=softcap)
            o, l = merge((out / total, (top + jnp.log(total))[..., 0]), (o, l))
            out = o.astype(q.dtype).reshape(B, G, H // G, W, e)
            return out.transpose(0, 3, 1, 2, 4).reshape(B, W, H, e), l.reshape(B, G, H // G, W).transpose(0, 3, 1, 2).reshape(B, W, H)
        narrow, wide = block_of(slots, BLOCK), block_of(slots, WIDE_BLOCK)
        start = (top, total, out), cache, length
        top, total, out = walk(narrow, *start) if narrow == wide else lax.platform_dependent(
            *start, cpu=functools.partial(walk, narrow), default=functools.partial(walk, wide))

    out = (out / total).astype(q.dtype).reshape(B, G, H // G, W, e)
    lse = (top + jnp.log(total)).reshape(B, G, H // G, W)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, W, H, e), lse.transpose(0, 3, 1, 2).reshape(B, W, H)

