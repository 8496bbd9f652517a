"""Exponential noise from a hash: a few integer operations a token, alike in XLA and in kernels.

`decodax.sampling.draw` says what it is for.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
       2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)


def exponentials(address: Array, size: int) -> Array:
    """Independent draws from the exponential distribution, one for each of `size` ids: `f32[..., size]`.

    They are taken from the side of small values, -log(1 - v) with v in steps of 2^-32, since it is a small time that
    lets an unlikely token win: tokens down to a probability of 1e-9 keep their chance.

    Args:
        address: `u32[..., 2]`.
    """
    return exponential(jnp.arange(size, dtype=jnp.uint32), address[..., :1], address[..., 1:])


def exponential(ids: Array, first: Array, second: Array) -> Array:
    """The draw of each id (`u32[...]`) at an address of two words (`u32[...]`): `f32[...]`."""
    bits = _mix((ids * jnp.uint32(0x9E3779B1) ^ first) * jnp.uint32(0x85EBCA6B) + second)
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


def _mix(x: Array) -> Array:
    """A permutation of `u32` in which each bit of the result depends on each of the argument (C. Wellons' "lowbias32",
    2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
