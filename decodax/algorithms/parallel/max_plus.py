"""Best paths through a chain of states: max-marginals and the Viterbi path, by products of max-plus matrices.

`L` columns of `K` states, and for each pair of neighbouring columns a score for each pair of states, `-inf` where there
is no step. Products of the matrices are associative, so all of them are made by a scan of depth `log L` (the tree of
Deng and Rush, 2020, section 3).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def product(a: Array, b: Array) -> Array:
    """Returns the max-plus product of matrices `f32[..., K, K]`: `max over j of a[i, j] + b[j, k]`."""
    return (a[..., :, :, None] + b[..., None, :, :]).max(-2)


def reached(edges: Array) -> tuple[Array, Array]:
    """Returns the best scores up to each state and from it on, `f32[L, K]` twice, for steps `edges` `f32[L - 1, K, K]`.

    >>> before, after = reached(jnp.array([[[1., 0.], [0., 3.]], [[0., 0.], [5., 0.]]]))
    >>> before.tolist(), after.tolist()
    ([[0.0, 0.0], [1.0, 3.0], [8.0, 3.0]], [[5.0, 8.0], [0.0, 5.0], [0.0, 0.0]])
    """
    none = jnp.zeros((1, edges.shape[-1]), edges.dtype)
    before = lax.associative_scan(product, edges).max(-2)
    after = lax.associative_scan(lambda a, b: product(b, a), edges, reverse=True).max(-1)
    return jnp.concatenate([none, before]), jnp.concatenate([after, none])


def max_marginals(edges: Array) -> Array:
    """Returns the score of the best path that takes each step: `f32[L - 1, K, K]` of the same.

    >>> max_marginals(jnp.array([[[1., 0.], [0., 3.]], [[0., 0.], [5., 0.]]])).tolist()
    [[[1.0, 5.0], [0.0, 8.0]], [[1.0, 1.0], [8.0, 3.0]]]
    """
    before, after = reached(edges)
    return before[:-1, :, None] + edges + after[1:, None, :]


def best_path(edges: Array) -> tuple[Array, Array]:
    """Returns the states of the best path, `i32[L]`, and its score, `f32[]`; of equal ones the one whose last states
    come first.

    The predecessor of each state is a map of states to states; the path is the composition of the maps of all columns,
    by a scan as well.

    >>> [x.tolist() for x in best_path(jnp.array([[[1., 0.], [0., 3.]], [[0., 0.], [5., 0.]]]))]
    [[1, 1, 0], 8.0]
    """
    before, _ = reached(edges)
    comes = jnp.argmax(before[:-1, :, None] + edges, 1).astype(jnp.int32)       # [L - 1, K]
    compose = lambda later, earlier: jnp.take_along_axis(earlier, later, -1)
    comes = lax.associative_scan(compose, comes, reverse=True)
    last = jnp.argmax(before[-1]).astype(jnp.int32)
    return jnp.concatenate([comes[:, last], last[None]]), before[-1, last]


