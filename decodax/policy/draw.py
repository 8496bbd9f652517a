"""Drawing a token by an exponential race, with noise that costs a few integer operations a token.

Each token `i` of a distribution `p` runs for a time `e_i / p_i`, with `e_i` exponential; the first to arrive is a draw
from `p`. The exponentials come from a hash of the draw's address (two words) and the token's id. So two distributions
that are drawn from at one address share their noise token by token: the more alike they are, the more often they give
the same token. That is what lets a draft that knows the address guess what the target will draw (`SeedExact`): with
the shipped pair 0.89 of what rejection sampling accepts at temperature 1 and 0.96 at 0.7, against 0.59 and 0.88 for a
shared uniform and the inverse of the distribution function.

A race needs no sort, no prefix sum, and no token's neighbours, so a vocabulary that is sharded over devices takes
reductions alone. On CPU a draw from 8 x 32,000 logits takes 0.4 ms, half as much again as
the inverse of the distribution function took; a threefry key a token would take 3.6.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from decodax.core.types import DEAD_END, INVALID

BLOCK = 256


def draw(logits: Array, address: Array) -> Array:
    """One token per distribution: `i32[...]` from `f32[..., V]` and `u32[..., 2]`.

    A token of probability 0 is never drawn. INVALID and DEAD_END stand where there is no distribution.
    """
    return winner(race(logits, address))


def race(logits: Array, address: Array) -> Array:
    """How early each token arrives: `f32[..., V]`, `p_i / e_i` up to a factor a distribution; the largest is first.

    In this order the tokens are a draw without replacement: the first `k` are `k` such draws. A token of probability 0
    has -inf, and a NaN or +inf among the logits gives a NaN.

    Args:
        logits: `f32[..., V]`, unnormalised. address: `u32[..., 2]`.

    >>> race(jnp.log(jnp.array([0.0, 0.5, 0.5])), jnp.array([1, 2], jnp.uint32)).argmin().item()
    0
    """
    arrival = jnp.exp(logits - logits.max(-1, keepdims=True)) / exponentials(address, logits.shape[-1])
    return jnp.where(logits == -jnp.inf, -jnp.inf, arrival)


def winner(scores: Array) -> Array:
    """The token of the largest score, the first of equal ones: `i32[...]` from `f32[..., V]`, logits or a race.

    INVALID stands where a score is a NaN or +inf, DEAD_END where all are -inf.
    """
    token, top = _first_max(scores)
    token = jnp.where(jnp.isnan(top) | (top == jnp.inf), INVALID, token)
    return jnp.where(top == -jnp.inf, DEAD_END, token).astype(jnp.int32)


def exponentials(address: Array, size: int) -> Array:
    """Independent draws from the exponential distribution, one for each of `size` ids: `f32[..., size]`.

    They are taken from the side of small values, -log(1 - v) with v in steps of 2^-32, since it is a small time that
    lets an unlikely token win: tokens down to a probability of 1e-9 keep their chance.
    """
    ids = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    bits = _mix(_mix(ids ^ address[..., :1]) + address[..., 1:])
    # v must stay below 1, whose time is infinite: as slow as a token of probability 0
    v = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    return -jnp.log1p(-v)


def _mix(x: Array) -> Array:
    """A permutation of `u32` in which each bit of the result depends on each of the argument (C. Wellons' "lowbias32",
    2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def first_argmax(x: Array) -> Array:
    """The first index of the largest entry along the last axis: `i32[...]` from `f32[..., V]`."""
    return _first_max(x)[0]


def _first_max(x: Array) -> tuple[Array, Array]:
    """The first index of the largest entry, and that entry. Of a NaN or +inf the place, and either."""
    # on CPU by blocks, in a seventh of the time of `jnp.argmax`; on a TPU blocks would take twelve times as long
    return lax.platform_dependent(x, cpu=_by_blocks, default=_at_once)


def _at_once(x: Array) -> tuple[Array, Array]:
    """One reduction, also where a vocabulary is sharded over devices."""
    def further(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (x, i), (y, j) = a, b
        # as for `jnp.argmax` a NaN is larger than all else
        more, same = (x > y) | (jnp.isnan(x) & ~jnp.isnan(y)), (x == y) | (jnp.isnan(x) & jnp.isnan(y))
        first = more | (same & (i < j))
        return jnp.where(first, x, y), jnp.where(first, i, j)

    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    start = jnp.array(-jnp.inf, x.dtype), jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32)
    top, token = lax.reduce((x, ids), start, further, (x.ndim - 1,))
    return token, top


def _by_blocks(x: Array) -> tuple[Array, Array]:
    # XLA's maximum on CPU may pass over a NaN
    x = jnp.where(jnp.isnan(x), jnp.inf, x)
    block = min(BLOCK, x.shape[-1])
    count = -(-x.shape[-1] // block)
    spare = count * block - x.shape[-1]
    if spare:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, spare)], constant_values=-jnp.inf)
    blocks = x.reshape(*x.shape[:-1], count, block)
    largest = blocks.max(-1)
    best = jnp.argmax(largest, -1)[..., None]
    inside = jnp.take_along_axis(blocks, best[..., None], -2)[..., 0, :]
    token = best[..., 0] * block + jnp.argmax(inside, -1)
    return token.astype(jnp.int32), jnp.take_along_axis(largest, best, -1)[..., 0]
