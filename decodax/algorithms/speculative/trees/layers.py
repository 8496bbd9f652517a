"""Trees that grow layer by layer and are then cut to their best nodes: the common code of EAGLE-2, OPT-Tree, DySpec and
RSD-S.

The rank of a candidate never rises from parent to child or from sibling to sibling, so the best candidates of all
layers are a tree. The growth of a row ends with a layer that adds nothing to them, and the loop ends with the last row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.source import Children, Grower, Growth
from decodax.algorithms.speculative.tree import Proposal
from decodax.core.window import take

Rank = Callable[[Growth, Array, Children, Any], tuple[Array, Any]]
"""A function that ranks the children of expanded nodes.

It takes the growth, the nodes' slots `i32[B, w]`, their children, and the values that the nodes got from their parents
(a pytree of `[B, w]`). It returns the children's ranks, `f32[B, w, R]` (-inf: no candidate), and the values for the
children, a pytree of `[B, w, R]`.
"""


def grow_layers(grower: Grower, state: Any, rank: Rank, root: Any, *, nodes: int, depth: int, width: int, fanout: int,
                keep: int | None = None,
                deeper: Callable[[Array, Array], Array] | None = None) -> tuple[Proposal, Any, Array]:
    """Grows a tree of the best `nodes` candidates of `depth` layers. In each layer the best `width` nodes are expanded
    by `fanout` children.

    Args:
        grower: grows the tree.
        state: the source's state.
        rank: maps (tree, slots of nodes `i32[B, w]`, their `Children`, the values that each node received) to the ranks
            of the children, `f32[B, w, R]` (-inf: no candidate), and the values that each child hands on, a pytree of
            `[B, w, R]`.
        root: values of the newest token, a pytree of `f32[B, 1]`.
        nodes: largest number of drafts.
        depth: largest number of layers.
        width: number of nodes expanded in a layer.
        fanout: number of children of an expanded node.
        keep: number of candidates that a layer keeps; None: as many as can be in the result.
        deeper: a function of the ranks of the best nodes before and after a layer, `f32[B, N]` each, that returns True
            for rows that grow another layer, `bool[B]`. None: they grow as long as a layer changes the best nodes.

    Returns:
        The results of `Shape.grow`. Window nodes are ordered by layer, and in a layer by rank.
    """
    keep = keep or min(nodes, max(width, 1) * fanout)
    width = min(width, keep)
    room, C = width * (depth - 1), keep * depth
    N = min(nodes, C)
    deeper = deeper or (lambda before, after: (before != after).any(-1))

    def layer(g: Growth, slots: Array, children: Children, handed: Any, above: Array) -> tuple[Any, Any]:
        """Returns the layer's candidates (tokens, ranks, parents' slots), each `[B, keep]`, and the values for the
        children of the first `width`."""
        r, passed = rank(g, slots, children, handed)
        # rounding must not lift a node over its parent or an earlier sibling
        r = jnp.where(children.live, jax.lax.cummin(jnp.minimum(r, above[..., None]), axis=2), -jnp.inf)
        flat = lambda x: x.reshape(x.shape[0], -1)
        fill = lambda x, value: jnp.pad(x, ((0, 0), (0, keep - x.shape[1])), constant_values=value)
        best, at = jax.lax.top_k(flat(r), min(keep, r.shape[1] * r.shape[2]))      # of equal ones the first
        parent = take(jnp.broadcast_to(slots, r.shape[:2]), at // fanout)
        found = (fill(take(flat(children.tokens), at), 0), fill(best, -jnp.inf), fill(parent, 0))
        return found, jax.tree.map(lambda x: fill(take(flat(x), at), 0)[:, :width], passed)

    def put(x: Any, new: Any, start: Array | int) -> Any:
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 1), x, new)

    g, children = grower.start(state, room, fanout)
    B = g.tokens.shape[0]
    zero = jnp.zeros((B, 1), jnp.int32)
    found, handed = layer(g, zero, children, root, jnp.full((B, 1), jnp.inf))
    pool = (jnp.zeros((B, C), jnp.int32), jnp.full((B, C), -jnp.inf), jnp.zeros((B, C), jnp.int32))
    pool = put(pool, found, 0)
    wide = lambda x: jnp.zeros((B, 1 + room, *x.shape[2:]), x.dtype).at[:, :1].set(x)
    log_q = jax.tree.map(wide, children.log_q)
    best = jax.lax.top_k(pool[1], N)[0]
    grows = deeper(jnp.full_like(best, -jnp.inf), best) & grower.s.running

    def unfinished(carry: Any) -> Array:
        d, grows = carry[0], carry[-1]
        return (d < depth) & grows.any()

    def visit(carry: Any) -> Any:
        d, g, pool, handed, log_q, best, grows = carry
        tokens, above, parents = (jax.lax.dynamic_slice_in_dim(x, (d - 1) * keep, width, 1) for x in pool)
        slots = jnp.broadcast_to(g.filled + jnp.arange(width, dtype=jnp.int32), (B, width))
        g, children = grower.expand(g, tokens, parents, fanout)
        found, handed = layer(g, slots, children, handed, jnp.where(grows[:, None], above, -jnp.inf))
        pool = put(pool, found, d * keep)
        after = jax.lax.top_k(pool[1], N)[0]
        return (d + 1, g, pool, handed, put(log_q, children.log_q, slots[0, 0]), after, grows & deeper(best, after))

    carry = (jnp.ones((), jnp.int32), g, pool, handed, log_q, best, grows)
    if depth > 1:
        carry = jax.lax.while_loop(unfinished, visit, carry)
    _, g, (tokens, ranks, above), _, log_q, _, _ = carry

    best, at = jax.lax.top_k(ranks, N)
    at = jnp.sort(jnp.where(best > -jnp.inf, at, C), 1)         # parents first, dead nodes last
    live, index = at < C, jnp.minimum(at, C - 1)
    node = jnp.full((B, C), -1, jnp.int32)
    node = jax.vmap(lambda x, i: x.at[i].set(1 + jnp.arange(N, dtype=jnp.int32), mode="drop"))(node, at)
    expanded = np.arange(room) // max(width, 1) * keep + np.arange(room) % max(width, 1)     # candidates by slot
    nodes_at = jnp.where(jnp.arange(room) < g.filled - 1, node[:, expanded], -1)
    up = take(jnp.concatenate([zero, nodes_at], 1), take(above, index))
    if log_q is not None:
        slot = np.zeros(C, np.int32)
        slot[expanded] = 1 + np.arange(room)
        log_q = take(log_q, jnp.concatenate([zero, jnp.asarray(slot)[index[:, :-1]]], 1))
    proposal = Proposal(tokens=take(tokens, index), live=live, parents=jnp.where(live, up, 0), log_q=log_q)
    return proposal, g.source, nodes_at


def drawn_from(children: Children) -> Array:
    """Returns the log-probability of each child under the distribution from which it was drawn, `f32[B, w, R]`; for
    drafts that were not drawn, the source's estimate of its log-probability."""
    if children.log_q is None:
        return children.log_p
    return jnp.where(children.live, jnp.take_along_axis(children.log_q, children.tokens, -1), -jnp.inf)


def left_before(log_q: Array) -> Array:
    """Returns the log of the probability mass that remains for each sibling after those before it are removed,
    `f32[..., R]`. `log_q` (`f32[..., R]`) are the siblings' log-probabilities."""
    q = jnp.exp(log_q)
    return jnp.log(jnp.maximum(1 - (jnp.cumsum(q, -1) - q), 0))


def at_least(**numbers: int) -> None:
    """Raises ValueError if one of the numbers is below 1; the error names it."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, takes at least 1")
