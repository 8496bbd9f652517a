"""Drawing a token by an exponential race, with noise that costs a few integer operations a token.

Each token `i` of a distribution `p` runs for a time `e_i / p_i`, with `e_i` exponential; the first to arrive is a draw
from `p`. The exponentials come from a hash of the draw's address (two words) and the token's id. So two distributions
that are drawn from at one address share their noise token by token: the more alike they are, the more often they give
the same token. That is what lets a draft that knows the address guess what the target will draw (`SeedExact`): with
the shipped pair 0.92 of what rejection sampling accepts at temperature 1 and 0.98 at 0.7, against 0.59 and 0.88 for a
shared uniform and the inverse of the distribution function.

A race needs no sort, no prefix sum, and no token's neighbours, so a vocabulary that is sharded over devices takes
reductions alone. On CPU a draw from 8 x 32,000 logits takes 0.3 to 0.5 ms, 1.2 to 1.5 times what the inverse of the
distribution function took there, and a hundredth of a step of a small model; a threefry key a token would take 3.6 ms.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from decodax.axes import MODEL, free_axes
from decodax.core.types import DEAD_END, INVALID

BLOCK = 256

LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
       2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)


def draw(logits: Array, address: Array, greedy: tuple[Array, Array] | None = None) -> Array:
    """One token per distribution: `i32[...]` from `f32[..., V]` and `u32[..., 2]`.

    A token of probability 0 is never drawn. INVALID and DEAD_END stand where there is no distribution.

    Args:
        greedy: `bool[...]` and `f32[..., V]`: distributions in whose place the largest entry of another array is taken.
    """
    top = logits.max(-1)
    scores, dead = -_times(logits, top, address), top == -jnp.inf
    if greedy is not None:
        scores, dead = jnp.where(greedy[0][..., None], greedy[1], scores), dead & ~greedy[0]
    # a NaN or +inf among the logits makes a NaN here, which XLA's maximum on CPU may pass over
    token, first = _first_max(jnp.where(jnp.isnan(scores), jnp.inf, scores))
    return _checked(token, jnp.where(dead, -jnp.inf, first))


def race(logits: Array, address: Array) -> Array:
    """How early each token arrives: `f32[..., V]`, minus its time `e_i / p_i` up to a factor a distribution; the
    largest is first.

    In this order the tokens are a draw without replacement: the first `k` are `k` such draws. A token of probability 0
    has -inf.

    Args:
        logits: `f32[..., V]`, unnormalised. address: `u32[..., 2]`.

    >>> race(jnp.log(jnp.array([0.0, 0.5, 0.5])), jnp.array([1, 2], jnp.uint32)).argmin().item()
    0
    """
    return jnp.where(logits == -jnp.inf, -jnp.inf, -_times(logits, logits.max(-1), address))


def winner(logits: Array) -> Array:
    """The token of the largest logit, the first of equal ones: `i32[...]` from `f32[..., V]`.

    INVALID stands where a logit is a NaN or +inf, DEAD_END where all are -inf.
    """
    return _checked(*_first_max(_plain(logits)))


def _checked(token: Array, top: Array) -> Array:
    """The token, or INVALID where the largest entry is +inf, DEAD_END where it is -inf."""
    return jnp.where(top == -jnp.inf, DEAD_END, jnp.where(top == jnp.inf, INVALID, token)).astype(jnp.int32)


def exponentials(address: Array, size: int) -> Array:
    """Independent draws from the exponential distribution, one for each of `size` ids: `f32[..., size]`.

    They are taken from the side of small values, -log(1 - v) with v in steps of 2^-32, since it is a small time that
    lets an unlikely token win: tokens down to a probability of 1e-9 keep their chance.
    """
    ids = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    bits = _mix((ids ^ address[..., :1]) * jnp.uint32(0x85EBCA6B) + address[..., 1:])
    # v must stay below 1, whose time is infinite: as slow as a token of probability 0
    return _minus_log1m(jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24)))


def _minus_log1m(v: Array) -> Array:
    """`-log(1 - v)` for `v` in [0, 1 - 2^-24], to 2e-7 of itself, in two thirds of the time of XLA's `log1p` on CPU.

    The polynomial is that of `logf` in S. Moshier's Cephes library. It takes `1 - v` as `2^k (1 + f)` with `f` around
    0: `-v` itself where `k` is 0, for `1 - v` has lost a small one's digits.
    """
    i = lax.bitcast_convert_type(1 - v, jnp.int32)
    k = (i - jnp.int32(0x3F3504F3)) >> 23           # the bits of the square root of 1/2
    f = jnp.where(k == 0, -v, lax.bitcast_convert_type(i - (k << 23), jnp.float32) - 1)
    p = jnp.full_like(f, LOG[0])
    for c in LOG[1:]:
        p = p * f + jnp.float32(c)
    return 0.5 * f * f - f * f * f * p - f - k.astype(jnp.float32) * jnp.float32(0.6931471805599453)


def _times(logits: Array, top: Array, address: Array) -> Array:
    """When each token arrives, `f32[..., V]`; a product, since CPUs divide slowly."""
    return exponentials(address, logits.shape[-1]) * jnp.exp(top[..., None] - logits)


def _plain(logits: Array) -> Array:
    # XLA's maximum on CPU may pass over a NaN
    return jnp.where(jnp.isnan(logits), jnp.inf, logits)


def _mix(x: Array) -> Array:
    """A permutation of `u32` in which each bit of the result depends on each of the argument (C. Wellons' "lowbias32",
    2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def first_argmax(x: Array) -> Array:
    """The first index of the largest entry along the last axis: `i32[...]` from `f32[..., V]`. A NaN counts as one."""
    return _first_max(_plain(x))[0]


def _first_max(x: Array) -> tuple[Array, Array]:
    """The first index of the largest entry, and that entry, of numbers."""
    # on CPU by blocks, in a seventh of the time of `jnp.argmax`; on a TPU blocks would take twelve times as long, and
    # where a vocabulary is divided they are not those of its parts, which would be gathered
    if free_axes().get(MODEL, 1) > 1:
        return _at_once(x)
    return lax.platform_dependent(x, cpu=_by_blocks, default=_at_once)


def _at_once(x: Array) -> tuple[Array, Array]:
    """One reduction, also where a vocabulary is sharded over devices."""
    def further(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (x, i), (y, j) = a, b
        first = (x > y) | ((x == y) & (i < j))
        return jnp.where(first, x, y), jnp.where(first, i, j)

    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    start = jnp.array(-jnp.inf, x.dtype), jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32)
    top, token = lax.reduce((x, ids), start, further, (x.ndim - 1,))
    return token, top


def _by_blocks(x: Array) -> tuple[Array, Array]:
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
