"""Selects the largest entries of a vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.common.axes import DATA, MODEL, constrain, free_axes, shardwise
from decodax.pallas_kernels.vocabulary.nodes import TILE, fitting, in_parts

BLOCK = 128


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """Returns the `k` largest entries along the last axis (the first of equal ones) and their indices, as `lax.top_k`
    does.

    A TPU sorts all entries for `lax.top_k`. The `k` largest entries are in the `k` blocks with the largest maxima, so
    here it sorts only these blocks. If the vocabulary is divided over devices, each first selects from its own part.

    Args:
        x: `f32[..., V]`.
        k: number of entries, at most `V`.

    >>> [y.tolist() for y in top_k(jnp.array([[1.0, 4.0, 2.0, 4.0]]), 3)]
    [[[4.0, 4.0, 2.0]], [[1, 3, 2]]]
    """
    if x.ndim == 3 and (width := fitting(x)) < x.shape[1]:
        return in_parts(lambda x: _somewhere(x, k), width, x)
    return _somewhere(x, k)


def _somewhere(x: Array, k: int) -> tuple[Array, Array]:
    rows = x.reshape(-1, x.shape[-1]) if x.ndim == 1 else x
    spec = P(DATA, *[None] * (rows.ndim - 2), MODEL)
    size = free_axes().get(MODEL, 1)
    if size > 1 and rows.shape[-1] % size == 0 and rows.shape[-1] // size >= k:
        values, places = shardwise(lambda x, ids: _offset(x, ids, k), (spec, P(MODEL)), (spec, spec), rows,
                                   jnp.arange(x.shape[-1], dtype=jnp.int32))
        values, best = lax.top_k(values, k)
        places = jnp.take_along_axis(places, best, -1)
        # Without this the compiler divides results that a loop carries over the axis.
        values, places = constrain((values, places), (P(DATA), P(DATA)))
    else:
        values, places = _top_k(rows, k)
    return values.reshape(*x.shape[:-1], k), places.reshape(*x.shape[:-1], k)


def _offset(x: Array, ids: Array, k: int) -> tuple[Array, Array]:
    # Use blocks on every platform: XLA's CPU gathers the whole rows of `lax.top_k`, here only those of a few blocks.
    values, places = lax.top_k(x, k) if x.shape[-1] < 4 * BLOCK * k else by_blocks(x, k)
    return values, places + ids[0]


def _top_k(x: Array, k: int) -> tuple[Array, Array]:
    if x.shape[-1] < 4 * BLOCK * k:
        return lax.top_k(x, k)
    return lax.platform_dependent(x, tpu=lambda x: by_blocks(x, k), default=lambda x: tuple(lax.top_k(x, k)))


def by_blocks(x: Array, k: int) -> tuple[Array, Array]:
    """Computes `lax.top_k(x, k)` by the maxima of blocks.

    An entry among the first `k` (by size, then by index) is in a block that is among the first `k` by maximum;
    otherwise each of `k` blocks would have an entry before it.
    """
    V = x.shape[-1]
    count = -(-V // BLOCK)
    if count * BLOCK != V:
        if x.ndim == 3 and x.shape[1] > TILE:     # the padded copy of a large tree would not fit into fast memory
            return in_parts(lambda x: by_blocks(x, k), TILE, x)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * BLOCK - V)], constant_values=-jnp.inf)
    blocks = x.reshape(*x.shape[:-1], count, BLOCK)
    which = jnp.sort(lax.top_k(blocks.max(-1), k)[1], -1)       # in order, so that the first of equal entries is taken
    inside = jnp.take_along_axis(blocks, which[..., None], -2)
    values, at = lax.top_k(inside.reshape(*x.shape[:-1], k * BLOCK), k)
    return values, jnp.take_along_axis(which, at // BLOCK, -1) * BLOCK + at % BLOCK
