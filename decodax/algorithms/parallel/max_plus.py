"""Best paths through a chain of states: max-marginals and the Viterbi path, by products of max-plus matrices.

There are `L` columns of `K` states. For two neighbouring columns, a matrix has a score for each pair of states, `-inf`
if they are not connected. The product of such matrices is associative, so all products are computed by a scan of depth
`log L` (the tree of Deng and Rush, 2020, section 3).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def product(a: Array, b: Array) -> Array:
    """Returns the matrix product of `a` and `b` (`f32[..., K, K]`) with maximum and sum in place of sum and product:
    entry `[i, k]` is the maximum over `j` of `a[i, j] + b[j, k]`."""
    return (a[..., :, :, None] + b[..., None, :, :]).max(-2)


def reached(edges: Array) -> tuple[Array, Array]:
    """Returns the score of the best path that ends in each state, and of the best path that begins in it, both `f32[L,
    K]`. `edges` is `f32[L - 1, K, K]`, the scores between neighbouring columns.

    >>> before, after = reached(jnp.array([[[1., 0.], [0., 3.]], [[0., 0.], [5., 0.]]]))
    >>> before.tolist(), after.tolist()
    ([[0.0, 0.0], [1.0, 3.0], [8.0, 3.0]], [[5.0, 8.0], [0.0, 5.0], [0.0, 0.0]])
    """
    none = jnp.zeros((1, edges.shape[-1]), edges.dtype)
    before = lax.associative_scan(product, edges).max(-2)
    after = lax.associative_scan(lambda a, b: product(b, a), edges, reverse=True).max(-1)
    return jnp.concatenate([none, before]), jnp.concatenate([after, none])


def max_marginals(edges: Array) -> Array:
    """Returns for each edge the score of the best complete path that contains it, `f32[L - 1, K, K]`, like `edges`.

    >>> max_marginals(jnp.array([[[1., 0.], [0., 3.]], [[0., 0.], [5., 0.]]])).tolist()
    [[[1.0, 5.0], [0.0, 8.0]], [[1.0, 1.0], [8.0, 3.0]]]
    """
    before, after = reached(edges)
    return before[:-1, :, None] + edges + after[1:, None, :]


def best_path(edges: Array) -> tuple[Array, Array]:
    """Returns the states of the best path, `i32[L]`, and its score, `f32[]`, for `edges` `f32[L - 1, K, K]`. Of equally
    good paths it is the one with the smallest last state.

    Each column maps a state to its best predecessor. The path follows from the composition of these maps, also by a
    scan.

    >>> [x.tolist() for x in best_path(jnp.array([[[1., 0.], [0., 3.]], [[0., 0.], [5., 0.]]]))]
    [[1, 1, 0], 8.0]
    """
    before, _ = reached(edges)
    comes = jnp.argmax(before[:-1, :, None] + edges, 1).astype(jnp.int32)       # [L - 1, K]
    compose = lambda later, earlier: jnp.take_along_axis(earlier, later, -1)
    comes = lax.associative_scan(compose, comes, reverse=True)
    last = jnp.argmax(before[-1]).astype(jnp.int32)
    return jnp.concatenate([comes[:, last], last[None]]), before[-1, last]


