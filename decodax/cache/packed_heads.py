"""A packed layout of keys and values for layers whose heads keep different numbers of tokens.

In an array `[G, S]`, every head takes as many slots as the largest one. Here the slots of a layer form segments of
`SEGMENT` tokens. Each head owns consecutive segments, enough for the tokens that it keeps and for later ones. The
number of segments is bounded by the total number of kept tokens. Attention is computed for each segment with the
queries of its owner, and the segments of a head are merged by their softmax sums, as in the variable-length kernel of
Ada-KV (Feng et al., 2024).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import platform
from decodax.core.window import take
from decodax.pallas_kernels.window_attention.reference import MASKED

SEGMENT = 64
"""Number of slots of a segment. The last segment of a head is half empty on average. With 32 slots, a round of `adakv`
after 512 tokens takes 4% longer on CPU (125M shape, 8 rows), since each segment is a product of its own."""
STEP = 4096
"""Number of slots, of all rows together, that attention processes at a time on CPU. Their keys and values are copied,
and the copy should fit in the processor's cache."""


def segments_of(total: int, heads: int, later: int, size: int) -> int:
    """Returns the number of segments of a layer that its heads need at most.

    Args:
        total: number of kept tokens of all heads together.
        heads: number of heads.
        later: number of later tokens of each head.
        size: maximum number of tokens of a head.

    >>> segments_of(2 * 100, 2, 20, 4096), segments_of(2 * 100, 2, 20, 64)
    (5, 2)
    """
    return min((total + heads * (later + SEGMENT - 1)) // SEGMENT, heads * -(-size // SEGMENT))


def owners(starts: Array, segments: int) -> Array:
    """Returns the head that owns each segment, `i32[segments]`. `starts` is the first segment of each head,
    `i32[G]`."""
    return (jnp.searchsorted(starts, jnp.arange(segments, dtype=jnp.int32), side="right") - 1).astype(jnp.int32)


def slots_of(starts: Array, rank: Array) -> Array:
    """Returns the slots of the `rank`-th tokens of each head, `i32[G, n]`, counted over all segments of the layer.

    Args:
        starts: `i32[G]`, the first segment of each head.
        rank: `i32[G or 1, n]`, numbers of tokens within their head, from 0.
    """
    return starts[:, None] * SEGMENT + rank


def pack(first: Array, number: Array, later: Array | int, size: int, segments: int) -> tuple[Array, Array, Array]:
    """Computes a packed layout for the tokens that the heads of a row keep.

    Args:
        first: `i32[G, S]`, the slots that each head keeps, in order; entries from `number` on are ignored.
        number: `i32[G]`, number of slots that each head keeps.
        later: number of later tokens to reserve slots for.
        size: maximum number of tokens of a head.
        segments: number of segments of the layer.

    Returns:
        The first segment of each head, `i32[G]`; the head of each packed slot, `i32[segments * SEGMENT]`; and the slot
        that it is copied from, of the same shape, -1 for an empty slot.
    """
    own = -(-jnp.minimum(number + later, size) // SEGMENT)
    starts = (jnp.cumsum(own) - own).astype(jnp.int32)
    head = jnp.repeat(owners(starts, segments), SEGMENT)
    rank = jnp.arange(segments * SEGMENT, dtype=jnp.int32) - starts[head] * SEGMENT
    source = first[head, jnp.clip(rank, 0, first.shape[1] - 1)]
    return starts, head, jnp.where(rank < number[head], source, -1)


def unpack(x: Array, starts: Array, count: Array, slots: int, empty: int = 0) -> Array:
    """Returns the packed values of a row for each head, `[G, slots, ...]`: first those of its tokens, then `empty`.

    Args:
        x: `[N, SEGMENT, ...]`, values of packed slots.
        starts: `i32[G]`, the first segment of each head.
        count: `i32[G]`, number of tokens of each head.
        slots: number of slots of each head in the result.
        empty: value of slots without a token.
    """
    flat = x.reshape(-1, *x.shape[2:])
    rank = jnp.arange(slots, dtype=jnp.int32)
    at = jnp.minimum(slots_of(starts, rank[None]), len(flat) - 1)
    filled = (rank < count[:, None]).reshape(*at.shape, *[1] * (x.ndim - 2))
    return jnp.where(filled, flat[at], jnp.asarray(empty, x.dtype))


def segment_attention(q: Array, kv: Array, seen: Array, starts: Array, *, scale: float,
                      softcap: float | None = None) -> tuple[Array, Array]:
    """Computes attention to packed keys and values.

    Args:
        q: `f[B, W, H, d]`, queries.
        kv: `f[B, N, SEGMENT, d + e]`, keys and then values of the packed slots.
        seen: `bool[B, N, SEGMENT]`, slots that the queries attend to.
        starts: `i32[B, G]`, the first segment of each head.
        scale: factor of the scores.
        softcap: bound of the scores, which become `softcap * tanh(score / softcap)`; None: no bound.

    Returns:
        `f32[B, W, H, e]`, and the logarithms of the softmax sums, `f32[B, W, H]`.
    """
    (B, W, H, d), G, e = q.shape, starts.shape[1], kv.shape[3] - q.shape[3]
    N, C = kv.shape[1:3]
    # the tokens of a head come before its room for later ones. On CPU the segments that hold tokens are gathered, head
    # after head, and the others are skipped
    steps = platform() == "cpu"
    place = jnp.arange(N, dtype=jnp.int32)
    owner = (starts[:, None] <= place[:, None]).sum(-1) - 1
    trips: Array | int = 1
    block = min(max(STEP // (B * C), 1), N) if steps else N
    if steps:
        each = ((owner[:, :, None] == jnp.arange(G)) & seen.any(-1)[:, :, None]).sum(1)       # [B, G]
        ends = each.cumsum(1)
        held, owner = ends[:, -1:], jnp.minimum((ends[:, None] <= place[:, None]).sum(-1), G - 1)
        first = jnp.take_along_axis(starts - ends + each, owner, 1)
        order, trips = jnp.minimum(first + place, N - 1), -(-held.max() // block)
    by_head = q.reshape(B, W, G, H // G, d).transpose(0, 2, 1, 3, 4).reshape(B, G, -1, d)
    asked = jnp.take_along_axis(by_head, owner[:, :, None, None], 1)              # [B, N, W r, d]

    def visit(i: Array, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        at = jnp.minimum(i * block, N - block)
        own = lambda x: lax.dynamic_slice_in_dim(x, at, block, 1)
        some, there = (take(x, own(order)) if steps else x for x in (kv, seen))
        there = (there & (own(place[None]) < held)[:, :, None] if steps else there)[:, :, None]
        scores = jnp.einsum("bnqd,bncd->bnqc", own(asked), some[..., :d], preferred_element_type=jnp.float32) * scale
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(there, scores, MASKED)
        top = scores.max(-1)
        weights = jnp.where(there, jnp.exp(scores - top[..., None]), 0)
        out = jnp.einsum("bnqc,bncd->bnqd", weights.astype(kv.dtype), some[..., d:], preferred_element_type=jnp.float32)
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, at, 1)
        return tuple(map(put, parts, (top, weights.sum(-1), out)))

    # each segment by itself, then those of a head together
    none = jnp.zeros((B, N, by_head.shape[2]), jnp.float32)
    empty = none + MASKED, none, jnp.zeros((*none.shape, e), jnp.float32)
    top, total, out = lax.fori_loop(0, trips, visit, empty)
    mine = (owner[:, :, None] == jnp.arange(G)).astype(jnp.float32)                # [B, N, G]
    high = jnp.where(mine[..., None] > 0, top[:, :, None], MASKED).max(1)          # [B, G, W r]
    shrink = jnp.exp(top - jnp.take_along_axis(high, owner[:, :, None], 1))
    total = jnp.einsum("bnq,bng->bgq", total * shrink, mine)
    out = jnp.einsum("bnqd,bng->bgqd", out * shrink[..., None], mine)
    some = total != 0       # true of a NaN, which must stay one
    total = jnp.where(some, total, 1)
    out, lse = jnp.where(some[..., None], out / total[..., None], 0), jnp.where(some, high + jnp.log(total), MASKED)
    back = lambda x: x.reshape(B, G, W, H // G, *x.shape[3:]).swapaxes(1, 2).reshape(B, W, H, *x.shape[3:])
    return back(out), back(lse)
