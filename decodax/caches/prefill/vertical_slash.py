"""Vertical-slash sparse attention: queries of a long text attend to a few columns and a few diagonals of the score
matrix ("MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention", Jiang et al.,
2024).

The pattern is estimated for each query head from the softmax weights of the last queries: the score of a column is its
sum (vertical), that of a diagonal the sum of the weights at one distance (slash). The keys of diagonals are loaded in
tiles of `block` keys, which all queries of a block share. The converter of the authors' kernel lays out the tiles of a
block as follows (`end` is the position where the block ends):

- Kept distances are visited from the farthest to the nearest. Those of `end` or more have no key and are skipped.
- A distance needs keys up to `max(end - distance, block)`. If this is more than a block after the end of the last tile,
  a new tile ends there. If it is less after the last tile's end, a tile follows that one without a gap. Otherwise the
  distance is covered already.

So a tile may begin after the first key of its diagonal, which is in the tile before, and end after the last one. A
query attends to the kept columns and to all keys of its block's tiles, up to its own position.

All functions treat one query head. They need memory for the keys that a group of blocks loads at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.pallas_kernels.window_attention import FixedBias

MASKED = -1e30
GROUP = 512
"""Number of queries in one step of the computation; they form blocks."""
TILES = 4
"""Number of tiles of each block that one step loads. On CPU, 4 take half of the time of 8 if a block has 3 tiles, and
the same time if it has many (8192 queries of a head of 64: 27 and 46 ms; 240 and 230 ms if the tiles have nearly all
keys)."""


def last_weights(q: Array, keys: Array, start: Array, end: Array, *, scale: float, bias: FixedBias | None) -> Array:
    """Returns the softmax weights of the last `N` queries of a segment on all keys up to their own positions, `f32[B,
    N, S]`.

    Args:
        q: `f[B, N, d]`, queries at the positions `end - N` to `end - 1`. Those before `start` are not in the segment
            and get zeros.
        keys: `f[B, S, d]`, keys at the positions 0 to `S - 1`.
        start: `i32[]`, position of the first query of the segment.
        end: `i32[B]`, position where the segment ends.
        scale: factor of the scores.
        bias: added to the scores; None: nothing.
    """
    N, S = q.shape[1], keys.shape[1]
    at = end[:, None] - N + jnp.arange(N, dtype=jnp.int32)
    where = jnp.arange(S, dtype=jnp.int32)
    s = jnp.einsum("bnd,bsd->bns", q, keys, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        s += bias(q[:, None], jnp.maximum(at, 0)[:, None, :, None])(keys[:, None], where[None, None, None])[:, 0]
    seen = where <= at[:, :, None]
    return jax.nn.softmax(jnp.where(seen, s, MASKED), axis=-1) * (seen & (at >= start)[..., None])


def diagonal_sums(weights: Array, end: Array) -> Array:
    """Returns the sum of the weights at each distance between query and key, `f32[B, S]`.

    Args:
        weights: `f32[B, N, S]`, weights of the queries at the positions `end - N` to `end - 1`.
        end: `i32[B]`.

    >>> diagonal_sums(jnp.array([[[1., 2., 0.], [3., 4., 5.]]]), jnp.array([3])).tolist()
    [[7.0, 5.0, 3.0]]
    """
    B, N, S = weights.shape
    # each row is one place further left than the row before, so that a diagonal becomes a column
    padded = jnp.pad(weights, ((0, 0), (0, 0), (N - 1, 1))).reshape(B, -1)
    sums = jnp.pad(padded, ((0, 0), (0, N))).reshape(B, N, S + N + 1).sum(1)
    # the column of distance 0 of query 0, whose position is `end - N`, is `end - 1`
    column = end[:, None] - 1 - jnp.arange(S, dtype=jnp.int32)
    return jnp.where(column >= 0, jnp.take_along_axis(sums, jnp.maximum(column, 0), 1), 0)


def pattern(weights: Array, end: Array, vertical: Array, slash: Array, most: tuple[int, int], first: int,
            near: int) -> tuple[Array, Array]:
    """Returns the columns (keys) and the distances between query and key that sparse attention keeps, `i32[B, V]` and
    `i32[B, D]`, padded with -1: those with the largest sums of weights.

    Of equal scores the earlier column and the smaller distance are kept.

    Args:
        weights: `f32[B, N, S]`, the result of `last_weights`.
        end: `i32[B]`, number of keys.
        vertical, slash: `i32[]`, numbers of columns and of distances to keep.
        most: static; the sizes `V` and `D` of the results, at most `S`.
        first, near: numbers of first columns and of smallest distances that are kept whatever their scores.
    """
    def best(scores: Array, always: int, number: Array, most: int) -> Array:
        place = jnp.arange(scores.shape[1])
        scores = jnp.where(place < always, jnp.inf, scores)
        found, index = lax.top_k(jnp.where(place < end[:, None], scores, -jnp.inf), most)
        return jnp.where((found >= 0) & (jnp.arange(most) < number), index, -1).astype(jnp.int32)

    return (best(weights.sum(1), first, vertical, most[0]), best(diagonal_sums(weights, end), near, slash, most[1]))


def marks(index: Array, size: int) -> Array:
    """Returns a mask of the numbers from 0 to `size - 1` that occur in `index` (`i32[B, n]`), `bool[B, size]`; negative
    numbers in it are ignored."""
    at = jnp.where(index >= 0, index, size)
    return jax.vmap(lambda at: jnp.zeros(size, bool).at[at].set(True, mode="drop"))(at)


def farthest_below(distances: Array, size: int) -> Array:
    """Returns for each number from 0 to `size` the largest smaller one among `distances` (`i32[B, n]`), `i32[B, size +
    1]`; -1 if there is none.

    >>> farthest_below(jnp.array([[0, 3, -1]]), 5).tolist()
    [[-1, 0, 0, 0, 3, 3]]
    """
    kept = jnp.where(marks(distances, size), jnp.arange(size, dtype=jnp.int32), -1)
    return jnp.pad(lax.cummax(kept, axis=1), ((0, 0), (1, 0)), constant_values=-1)


def next_tile(below: Array, end: Array, last_end: Array, block: int) -> tuple[Array, Array]:
    """Returns the position where the next tile of keys ends that each of `J` blocks of queries loads, `i32[B, J]`, and
    whether there is one, `bool[B, J]`.

    Args:
        below: `i32[B, S + 1]`, the result of `farthest_below`.
        end: `i32[J]`, positions where the blocks of queries end.
        last_end: `i32[B, J]`, where the tile that the block loaded last ends; 0: none yet.
        block: number of keys of a tile.
    """
    far = jnp.take_along_axis(below, jnp.clip(end - last_end, 0, below.shape[1] - 1), 1)
    return jnp.where(far >= 0, jnp.maximum(end - far, last_end + block), last_end), far >= 0


def sparse_attention(q: Array, kv: Array, start: Array, stop: Array, columns: Array, distances: Array, *, scale: float,
                     block: int, bias: FixedBias | None = None, sink: Array | None = None) -> Array:
    """Returns causal attention of the queries of a segment, in one head, to the keys of the kept columns and of the
    tiles that cover the kept distances, `f32[B, W, e]`.

    Args:
        q: `f[B, W, d]`; `W` is a multiple of `step_of`.
        kv: `f[B, S, d + e]`, keys and values up to the segment's end; `S` is larger than `block`.
        start: `i32[]`, position of the first query.
        stop: `i32[]`, position where the queries end; later queries get zeros.
        columns, distances: `i32[B, V]` and `i32[B, D]`, the result of `pattern`.
        scale: factor of the scores.
        block: number of queries of a block, and of keys of a tile.
        bias: added to the scores; it must be the same for all heads, as a bias without arrays is.
        sink: `f[]`, a score in the softmax that has no value; None: there is none.
    """
    (B, W, d), (S, D) = q.shape, kv.shape[1:]
    group = step_of(W, block)
    J = group // block
    below, apart = farthest_below(distances, S), ~marks(columns, S)
    few = jnp.take_along_axis(kv, jnp.maximum(columns, 0)[..., None], 1)
    tile = jnp.arange(block, dtype=jnp.int32)

    def added(s: Array, q: Array, at: Array, keys: Array, where: Array) -> Array:
        if bias is None:
            return s
        return s + bias(q[:, None], at[:, None, :, None])(keys[:, None], where[:, None, None])[:, 0]

    def read(carry: tuple[Array, Array, Array], q: Array, at: Array, both: Array, where: Array,
             seen: Array) -> tuple[Array, Array, Array]:
        """Continues a running softmax over keys and values `f[N, K, d + e]` at `where`, `i32[N, K]`."""
        top, total, out = carry
        s = jnp.einsum("nqd,nkd->nqk", q, both[..., :d], preferred_element_type=jnp.float32) * scale
        visible = seen[:, None] & (where[:, None] <= at[:, :, None])
        s = jnp.where(visible, added(s, q, at, both[..., :d], where), MASKED)
        new = jnp.maximum(top, s.max(-1, keepdims=True))
        shrink, weights = jnp.exp(top - new), jnp.where(visible, jnp.exp(s - new), 0)
        more = jnp.einsum("nqk,nkd->nqd", weights.astype(kv.dtype), both[..., d:], preferred_element_type=jnp.float32)
        return new, total * shrink + weights.sum(-1, keepdims=True), out * shrink + more

    def visit(i: Array, out: Array) -> Array:
        from_ = start + i * group
        at = jnp.broadcast_to(from_ + jnp.arange(group, dtype=jnp.int32), (B, group))
        own = lax.dynamic_slice_in_dim(q, i * group, group, 1)
        none = jnp.zeros((B, group, 1), jnp.float32)
        begun = (none + MASKED, none) if sink is None else (none + sink.astype(jnp.float32), none + 1)
        carry = *begun, jnp.zeros((B, group, D - d), jnp.float32)
        carry = read(carry, own, at, few, columns, columns >= 0)

        # the blocks of queries apart from here on
        blocks = lambda x: x.reshape(B * J, block, *x.shape[2:])
        end = from_ + block * (1 + jnp.arange(J, dtype=jnp.int32))

        def step(state: tuple[Array, tuple[Array, Array, Array]]) -> tuple[Array, tuple[Array, Array, Array]]:
            last_end, carry = state
            tiles = []
            for _ in range(TILES):
                last_end, there = next_tile(below, end, last_end, block)
                tiles.append(jnp.where(there, last_end - block, -1))
            begin = jnp.stack(tiles, -1).reshape(B, -1)
            # a slice that would leave the array is moved inside; its keys before the tile's own are masked
            place = jnp.clip(begin, 0, S - block)
            some = jax.vmap(lambda x, at: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, block, 0))(at))
            where = place[..., None] + tile
            seen = (begin[..., None] >= 0) & (where >= begin[..., None]) & some(apart, place)
            flat = lambda x: x.reshape(B * J, TILES * block, *x.shape[3:])
            return last_end, read(carry, blocks(own), blocks(at), flat(some(kv, place)), flat(where), flat(seen))

        more = lambda state: next_tile(below, end, state[0], block)[1].any()
        state = jnp.zeros((B, J), jnp.int32), jax.tree.map(blocks, carry)
        _, total, sums = lax.while_loop(more, step, state)[1]
        found = (sums / jnp.where(total > 0, total, 1)).reshape(B, group, D - d)
        return lax.dynamic_update_slice_in_dim(out, found, i * group, 1)

    steps = jnp.clip((stop - start + group - 1) // group, 0, W // group)
    return lax.fori_loop(0, steps, visit, jnp.zeros((B, W, D - d), jnp.float32))


def step_of(queries: int, block: int) -> int:
    """Returns the number of queries that `sparse_attention` processes in a step: a multiple of `block`, at most
    `queries`.

    >>> step_of(4096, 64), step_of(128, 64), step_of(4096, 640)
    (512, 128, 640)
    """
    return min(max(GROUP // block, 1) * block, queries)
