"""Zero-computation experts ("LongCat-Flash Technical Report", Meituan, 2025): experts whose output is their input.

They have no weights, so a token that chooses one multiplies a kernel less. Their share of the mixture is the token
itself, times the sum of their weights; no expert is run for it.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array


def unchanged(x: Array, which: Array, weights: Array, count: int) -> Array:
    """Returns the share of the zero-computation experts in a mixture, `f[n, D]`, in the dtype of `x`.

    Args:
        x: the tokens, `f[n, D]`.
        which: `i32[n, k]`, the chosen experts; those from `count` on are zero-computation experts.
        weights: `f32[n, k]`, their weights.
        count: number of experts with weights.

    >>> unchanged(jnp.ones((1, 2)), jnp.array([[0, 3]]), jnp.array([[0.75, 0.5]]), 3).tolist()
    [[0.5, 0.5]]
    """
    worth = jnp.where(which >= count, weights, 0)
    # Added one after the other, as in `mix`: the order of a reduction depends on the shape.
    return functools.reduce(jnp.add, (worth[:, j, None] for j in range(which.shape[1]))).astype(x.dtype) * x
