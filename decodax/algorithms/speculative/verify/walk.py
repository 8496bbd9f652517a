"""Verification of a tree from the root down, for verifiers that test the children of a node together (`MultiRound`,
`KSeq`)."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.tree import Tree, at_parents, path_to
from decodax.algorithms.speculative.verifier import Verifier
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import draw


class SiblingVerifier(Verifier):
    """Base class of verifiers that test the children of a node together, from the root of the tree down, until none is
    accepted; the next token is then drawn from the residual distribution. Derive a frozen dataclass."""

    @abc.abstractmethod
    def siblings(self, p: Array, q: Any, tokens: Array, children: Array, dead: Array,
                 u: Array) -> tuple[Array, Array, Array]:
        """Tests the children of one tree node.

        Args:
            p: `f32[V]`, the target's probabilities after the node.
            q: `f32[V]`, probabilities from which the children were drawn; a function of a child's index `i32[]` if each
                was drawn from a distribution of its own; None: they were not drawn (`certain` tests such children).
            tokens: `i32[1 + N]`, tokens of all nodes of the tree.
            children, dead: `bool[1 + N]`, the node's live children, and its dead ones.
            u: `f32[1 + N]`, a uniform random number for each node.

        Returns:
            The accepted child, `i32[]`; whether there is one, `bool[]`; and the residual distribution, `f32[V]`,
                unnormalised.
        """

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return walk(self.siblings, dist, s, tree)


def walk(siblings: Callable[..., tuple[Array, Array, Array]], dist: Distribution, s: State, tree: Tree
         ) -> tuple[Array, Array, Array]:
    """Verifies a draft tree from the root down: at each node `siblings` (`SiblingVerifier.siblings`) tests the
    children, until none is accepted; the next token is then drawn from the residual distribution.

    Returns the path of accepted nodes, `i32[B, longest + 1]`; the number of accepted drafts, `i32[B]`; and the drawn
    token, `i32[B]`. The outcome at a level does not depend on the levels below, and its position is decided in this
    round. So noise addressed by position and rank is never used twice.
    """
    log_p = dist.log_probs()
    parents = jnp.broadcast_to(tree.parents, tree.tokens.shape)
    nodes = jnp.arange(tree.size, dtype=jnp.int32)
    rank = ((parents[:, :, None] == parents[:, None, :]) & (nodes[None, :] < nodes[:, None])).sum(-1)
    one = lambda key, position, rank: jax.random.uniform(keys.at(key, position, Purpose.ACCEPT, rank))
    u = jax.vmap(jax.vmap(one, (None, 0, 0)))(s.key, at_parents(tree, dist.predicts), rank)

    def row(log_p: Array, log_q: Array | None, tokens: Array, parents: Array, live: Array,
            u: Array) -> tuple[Array, Array]:
        def visit(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            node = carry[0]
            q: Any = None
            if log_q is not None and tree.drawn_at is not None:
                q = lambda child: jnp.exp(log_q[jnp.asarray(tree.drawn_at)[child - 1]])
            elif log_q is not None:
                q = jnp.exp(log_q[jnp.minimum(node, log_q.shape[0] - 1)])
            own = parents == node
            child, accepted, left = siblings(jnp.exp(log_p[node]), q, tokens, own & live, own & ~live, u)
            return jnp.where(accepted, child, node).astype(jnp.int32), accepted, left

        start = (jnp.zeros((), jnp.int32), jnp.ones((), bool), jnp.zeros(log_p.shape[1]))
        node, _, left = lax.while_loop(lambda carry: carry[1], visit, start)
        return node, left

    node, left = jax.vmap(row)(log_p, tree.log_q, tree.drawn, parents, tree.live, u)
    predicts = jnp.take_along_axis(dist.predicts, node[:, None], 1)
    own = draw(jnp.log(left)[:, None], keys.addresses(s.key, predicts, Purpose.RESIDUAL))[:, 0]
    depth = jnp.take_along_axis(jnp.broadcast_to(tree.depth, tree.tokens.shape), node[:, None], 1)[:, 0]
    return path_to(tree, node), depth, own


def residual(left: Array, p: Array) -> Array:
    """Returns the positive part of `left` (`f32[..., V]`), or `p` if nothing is positive.

    Without a positive part a rejection is possible only by rounding, and p is the right limit. A p with NaN or only
    zeros is returned as it is, and then determines the row's status.
    """
    left = jnp.maximum(left, 0)
    return jnp.where(left.sum(-1, keepdims=True) > 0, left, p)


def certain(p: Array, tokens: Array, children: Array, u: Array) -> tuple[Array, Array, Array]:
    """Tests the children of a tree node that were chosen and not drawn (so that there is no distribution q). Each is
    accepted with its share of the target's probabilities p that earlier children have left. In total, one is accepted
    with the sum of p over the children; no rule that keeps p accepts more often.

    For the arguments and the results see `SiblingVerifier.siblings`.
    """
    n = jnp.arange(tokens.shape[0])
    again = ((tokens[:, None] == tokens) & children & (n < n[:, None])).any(-1)
    chance = jnp.where(children & ~again, p[tokens], 0)
    holds = (u * (p.sum() - (jnp.cumsum(chance) - chance)) < chance) & (chance > 0)
    left = p.at[jnp.where(children, tokens, p.shape[0])].set(0, mode="drop")
    return jnp.argmax(holds), holds.any(), residual(left, p)
