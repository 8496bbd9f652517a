"""Selection without a sort: the largest threshold that leaves enough, by bisection on the float's bit pattern.

Read as integers, floats of one sign are ordered as their values are; 32 halvings find a threshold exactly, whatever
the values. On CPU (32,000 logits; 1 and 8 positions) top-k takes 0.15 and 1.2 ms and top-p 0.16 and 1.4 ms this way;
`lax.top_k` of 128 takes 0.08 and 0.75 ms, a full sort 6 and 48 ms. Searching 4 ways in half the passes was slower.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax


def largest_threshold(enough: Callable[[Array], Array]) -> Array:
    """The largest `t` (`f32[]`) for which `enough(t)` is true, NaN if none is.

    Args:
        enough: true up to some value and false above it, like "at least k logits are >= t". Comparisons with the NaN
            that says "no threshold" are false, so `where(x < t, -inf, x)` then removes nothing.

    >>> x = jnp.array([3.0, -jnp.inf, 7.5, -2.0])
    >>> [largest_threshold(lambda t: jnp.sum(x >= t) >= k).item() for k in (1, 2, 3)]
    [7.5, 3.0, -2.0]
    """
    def halve(i: Array, best: Array) -> Array:
        trial = best | lax.shift_left(jnp.uint32(1), (31 - i).astype(jnp.uint32))
        return jnp.where(enough(_float(trial)), trial, best)

    return _float(lax.fori_loop(0, 32, halve, jnp.uint32(0)))


def kth_largest(x: Array, k: Array) -> Array:
    """The `k`-th largest of `f32[V]` (`k` is traced), NaN where there are fewer."""
    # counting in float32 is exact up to 2^24 and faster than in integers on CPU
    return largest_threshold(lambda t: jnp.where(x >= t, 1.0, 0.0).sum() >= k)


def forbid(logits: Array, tokens: Array) -> Array:
    """-inf at `tokens` (`bool[V]`), except that a NaN stays: broken logits must reach the draw, which reports them."""
    return jnp.where(tokens & ~jnp.isnan(logits), -jnp.inf, logits)


def members(ids: Array, size: int) -> Array:
    """`bool[size]`: which tokens are among `ids` (`i32[...]`; negative ones are padding).

    >>> members(jnp.array([2, -1]), 4).tolist()
    [False, False, True, False]
    """
    return jnp.zeros(size, bool).at[jnp.where(ids >= 0, ids, size)].set(True, mode="drop")


def probabilities(logits: Array) -> tuple[Array, Array, Array]:
    """`f32[V]` log-probabilities and probabilities, and the entropy `f32[]` in nats."""
    shifted = logits - logits.max()
    weights = jnp.exp(shifted)
    total = weights.sum()
    p, log_p = weights / total, shifted - jnp.log(total)
    return log_p, p, -jnp.sum(jnp.where(p == 0, 0, p * log_p))


def _float(ordered: Array) -> Array:
    """The float whose place among all floats is `ordered` (`u32[]`): NaNs stand at both ends."""
    bits = lax.bitcast_convert_type(ordered ^ jnp.uint32(1 << 31), jnp.int32)
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)
