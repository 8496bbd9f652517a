"""Heads of different lengths in memory of their sum: the layout of a layer whose heads keep different numbers of
tokens.

A rectangle `[G, S]` is as wide as its largest head may become. Here the slots of a layer lie in segments of a few
tokens, and a head owns as many segments, one after another, as it needs for what it keeps and for the tokens to come.
What the heads keep together bounds how many segments there are. Attention goes over segments, each with the queries of
its owner, and the segments of a head are merged by their softmax sums (as the variable-length kernel of Ada-KV does:
Feng et al., 2024).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import platform
from decodax.core.window import take
from decodax.pallas_kernels.window_attention.reference import MASKED

SEGMENT = 64
"""Slots of a segment. A head leaves half of one empty on the average; with half as many a round of `adakv` behind 512
tokens takes 4% longer on CPU (125M shape, 8 rows), since each segment is a product of its own."""
STEP = 4096
"""Slots, of all rows together, that are attended to at a time on CPU, where what is taken out of keys and values is
copied, and the copy should stay near."""


def segments_of(total: int, heads: int, later: int, size: int) -> int:
    """How many segments hold `total` tokens of so many heads, and `later` more of each; a head has at most `size`.

    >>> segments_of(2 * 100, 2, 20, 4096), segments_of(2 * 100, 2, 20, 64)
    (5, 2)
    """
    return min((total + heads * (later + SEGMENT - 1)) // SEGMENT, heads * -(-size // SEGMENT))


def owners(starts: Array, segments: int) -> Array:
    """`i32[segments]`: the head that owns each segment, by the first segment of each head (`i32[G]`)."""
    return (jnp.searchsorted(starts, jnp.arange(segments, dtype=jnp.int32), side="right") - 1).astype(jnp.int32)


def slots_of(starts: Array, rank: Array) -> Array:
    """The slots (of all segments in a row) of the `rank`-th tokens of each head, `i32[G, n]`."""
    return starts[:, None] * SEGMENT + rank


def pack(first: Array, number: Array, later: Array | int, size: int, segments: int) -> tuple[Array, Array, Array]:
    """Where what the heads of a row keep comes to lie.

    Args:
        first: `i32[G, S]`, the slots that each head keeps in front, in order. number: `i32[G]`, how many those are.
        later: tokens to come. size: the most that a head may have.

    Returns:
        The first segment of each head, `i32[G]`; and for each packed slot its head and the slot it comes from, both
        `i32[segments * SEGMENT]`, the latter -1 where nothing comes.
    """
    own = -(-jnp.minimum(number + later, size) // SEGMENT)
    starts = (jnp.cumsum(own) - own).astype(jnp.int32)
    head = jnp.repeat(owners(starts, segments), SEGMENT)
    rank = jnp.arange(segments * SEGMENT, dtype=jnp.int32) - starts[head] * SEGMENT
    source = first[head, jnp.clip(rank, 0, first.shape[1] - 1)]
    return starts, head, jnp.where(rank < number[head], source, -1)


def unpack(x: Array, starts: Array, count: Array, slots: int, empty: int = 0) -> Array:
    """`[G, slots, ...]` of a row's `[N, SEGMENT, ...]`: each head's tokens in front, `empty` behind them."""
    flat = x.reshape(-1, *x.shape[2:])
    rank = jnp.arange(slots, dtype=jnp.int32)
    at = jnp.minimum(slots_of(starts, rank[None]), len(flat) - 1)
    filled = (rank < count[:, None]).reshape(*at.shape, *[1] * (x.ndim - 2))
    return jnp.where(filled, flat[at], jnp.asarray(empty, x.dtype))


def segment_attention(q: Array, kv: Array, seen: Array, starts: Array, *, scale: float,
                      softcap: float | None = None) -> tuple[Array, Array]:
    """Attention of queries `f[B, W, H, d]` to packed keys and values `f[B, N, SEGMENT, d + e]` where `seen` (`bool[B,
    N, SEGMENT]`): `f32[B, W, H, e]`, and the logarithms of the softmax sums, `f32[B, W, H]`. `starts` are `i32[B, G]`.
    """
    (B, W, H, d), G, e = q.shape, starts.shape[1], kv.shape[3] - q.shape[3]
    N, C = kv.shape[1:3]
    # a head's tokens lie in front of its room for those to come. On CPU the segments that hold some are gathered, head
    # after head, and the rest is left out
    steps = platform() == "cpu"
    place = jnp.arange(N, dtype=jnp.int32)
    owner = (starts[:, None] <= place[:, None]).sum(-1) - 1
    trips: Array | int = 1
    block = min(max(STEP // (B * C), 1), N) if steps else N
    if steps:
        each = ((owner[:, :, None] == jnp.arange(G)) & seen.any(-1)[:, :, None]).sum(1)       # [B, G]
        behind = each.cumsum(1)
        held, owner = behind[:, -1:], jnp.minimum((behind[:, None] <= place[:, None]).sum(-1), G - 1)
        first = jnp.take_along_axis(starts - behind + each, owner, 1)
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
