"""Functions that transforms share: thresholds, sets of tokens, probabilities.

The search for a threshold is in `decodax.pallas_kernels.vocabulary.threshold`; its functions can be imported from here,
too.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.pallas_kernels.vocabulary.threshold import by_digits, by_halves, kth_largest, largest_threshold, less, once

__all__ = ["by_digits", "by_halves", "forbid", "kth_largest", "largest_threshold", "less", "members", "once",
           "probabilities"]


def forbid(logits: Array, tokens: Array) -> Array:
    """Sets the logits of `tokens` (`bool[V]`) to -inf. A NaN is not changed: invalid logits must reach the draw, which
    reports them."""
    return jnp.where(tokens & ~jnp.isnan(logits), -jnp.inf, logits)


def members(ids: Array, size: int) -> Array:
    """Returns `bool[size]`: True for tokens among `ids` (`i32[...]`; negative ones are padding).

    >>> members(jnp.array([2, -1]), 4).tolist()
    [False, False, True, False]
    """
    return jnp.zeros(size, bool).at[jnp.where(ids >= 0, ids, size)].set(True, mode="drop")


def probabilities(logits: Array) -> tuple[Array, Array, Array]:
    """Returns the softmax of `logits` (`f32[V]`): log-probabilities, `f32[V]`, probabilities, `f32[V]`, and the entropy
    in nats, `f32[]`."""
    shifted = logits - logits.max()
    weights = jnp.exp(shifted)
    total = weights.sum()
    p, log_p = weights / total, shifted - jnp.log(total)
    return log_p, p, -jnp.sum(jnp.where(p == 0, 0, p * log_p))
