"""Selection without sorting: finds the largest threshold that keeps enough entries, by a search over float bit
patterns.

As integers, floats of one sign have the order of their values, so 32 bits determine a threshold exactly for any values.
CPUs and GPUs find the bits one by one, TPUs three or four at a time.

On CPU (32,000 logits; 1 and 8 positions) top-k takes 0.15 and 1.2 ms and top-p 0.16 and 1.4 ms this way; `lax.top_k` of
128 takes 0.08 and 0.75 ms, a full sort 6 and 48 ms. Searching 4 ways in half the passes was slower there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.common.axes import MODEL, free_axes, platform, shardwise


def largest_threshold(order: Array, weights: Array, share: Array) -> Array:
    """Returns the largest `t` (`f32[]`) such that the entries with `order >= t` have at least `share` of the total
    weight, and a positive weight.

    The result is NaN if there is none. Comparisons with it are then false, so `where(x < t, -inf, x)` removes nothing.

    Args:
        order: `f32[V]`, values of the entries.
        weights: `f32[V]`, or one `f32[]` for all; not negative.
        share: `f32[]`, share of the total weight.

    >>> x, one = jnp.array([3.0, -jnp.inf, 7.5, -2.0]), jnp.float32(1)
    >>> [largest_threshold(x, one, jnp.float32(share)).item() for share in (0.2, 0.5, 0.7)]
    [7.5, 3.0, -2.0]
    """
    # Both are correct on every platform and find the same threshold up to the rounding of sums.
    return (by_digits if platform() == "tpu" else by_halves)(order, weights, share)


def once(x: Array) -> Array:
    """Returns `x` after an optimization barrier, which makes XLA compute it once, so that `largest_threshold` and
    `less` compare the same rounded values."""
    return lax.optimization_barrier(x)


def less(x: Array, threshold: Array) -> Array:
    """Returns `x < threshold`, `bool[V]`, for the same computed values of `x` among which the threshold was found.

    Otherwise XLA's CPU computes `x` again for the comparison, barrier or not, and rounds it differently, so that the
    last token to keep is removed. Nothing is fused into a loop; this loop runs once, or not at all if there is no
    threshold.
    """
    if platform() != "cpu":
        return x < threshold
    compare = lambda c: (jnp.zeros((), bool), x < threshold)
    return lax.while_loop(lambda c: c[0], compare, (threshold == threshold, jnp.zeros(x.shape, bool)))[1]


def by_halves(order: Array, weights: Array, share: Array) -> Array:
    """Returns the result of `largest_threshold` by bisection over the 32 bits of a float: 32 passes with one sum over
    the vocabulary each."""
    least = share * jnp.broadcast_to(weights, order.shape).sum()

    def halve(i: Array, best: Array) -> Array:
        trial = best | lax.shift_left(jnp.uint32(1), (31 - i).astype(jnp.uint32))
        mass = jnp.where(order >= of_order(trial), weights, 0).sum()
        return jnp.where((mass >= least) & (mass > 0), trial, best)

    return of_order(lax.fori_loop(0, 32, halve, jnp.uint32(0)))


def by_digits(order: Array, weights: Array, share: Array) -> Array:
    """Returns the result of `largest_threshold` by a search over several bits at a time: 11 passes over the vocabulary
    of 7 sums each, or 8 passes of 15.

    On a TPU a pass over a vocabulary takes little longer with several sums than with one. If the vocabulary is divided
    over devices, they exchange their sums in each pass, so fewer passes are used.
    """
    size = free_axes().get(MODEL, 1)
    if size > 1 and order.shape[0] % size == 0:
        search = functools.partial(_by_digits, bits=4, total=functools.partial(lax.psum, axis_name=MODEL))
        return shardwise(search, (P(MODEL), P(MODEL) if weights.ndim else P(), P()), P(), order, weights, share)
    return _by_digits(order, weights, share, bits=3, total=lambda sums: sums)


def _by_digits(order: Array, weights: Array, share: Array, bits: int,
               total: Callable[[tuple[Array, ...]], tuple[Array, ...]]) -> Array:
    add = lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True))
    weights = jnp.broadcast_to(weights, order.shape)

    def sums(*arrays: Array) -> tuple[Array, ...]:
        # One reduction of many operands reads the vocabulary once.
        return total(tuple(lax.reduce(arrays, (jnp.zeros((), weights.dtype),) * len(arrays), add, (0,))))

    def trials(best: Array, i: Array) -> list[Array]:
        # Separate arrays rather than one array of all: XLA then fuses the operations on them into one.
        place = jnp.maximum(32 - bits * (i + 1), 0).astype(jnp.uint32)      # the last digit may overlap the one before
        return [best | lax.shift_left(jnp.uint32(d), place) for d in range(1, 1 << bits)]

    def above(tried: list[Array]) -> list[Array]:
        return [jnp.where(order >= of_order(t), weights, 0) for t in tried]

    def best_of(best: Array, tried: list[Array], masses: tuple[Array, ...], least: Array) -> Array:
        for t, mass in zip(tried, masses, strict=True):
            best = jnp.where((mass >= least) & (mass > 0), jnp.maximum(best, t), best)
        return best

    def digit(i: Array, best: Array) -> Array:
        tried = trials(best, i)
        return best_of(best, tried, sums(*above(tried)), least)

    tried = trials(jnp.uint32(0), jnp.int32(0))
    whole, *masses = sums(weights, *above(tried))
    least = share * whole
    best = best_of(jnp.uint32(0), tried, tuple(masses), least)
    return of_order(lax.fori_loop(1, -(-32 // bits), digit, best, unroll=True))


def kth_largest(x: Array, k: Array) -> Array:
    """Returns the `k`-th largest entry, `f32[]`, of `x`, `f32[V]`, counting equal ones separately; NaN if there are
    fewer. `k` is `i32[]` and may be traced."""
    # Counting in float32 is exact up to 2^24 and faster than in integers on CPU; subtracting a half absorbs rounding.
    return largest_threshold(x, jnp.float32(1), (k.astype(jnp.float32) - 0.5) / x.shape[-1])


def of_order(ordered: Array) -> Array:
    """Returns the float32 with the given rank, `u32[]`, in the order of all float32 numbers, which includes NaNs at
    both ends."""
    bits = lax.bitcast_convert_type(ordered ^ jnp.uint32(1 << 31), jnp.int32)
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)
