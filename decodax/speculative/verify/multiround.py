"""Rejection sampling of a tree, sibling by sibling.

At a node the children are tried in turn: one is accepted with probability min(1, p(x) / q(x)); after a rejection the
target becomes the normalised positive part of p - q, and, where children are drawn without replacement, the rejected
token leaves q. The first accepted child is the next node; if none is, the token comes from what is left of p.
SpecInfer (Miao et al. 2024) with replacement; MCSD (Yang et al. 2024), RSD (Jeon et al. 2024) and Sequoia (Chen et al.
2024) without.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import take
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.policy.draw import draw
from decodax.speculative.source import Drawn
from decodax.speculative.tree import Tree, path_to
from decodax.speculative.verify.base import AnyTree, Guarantee


@dataclasses.dataclass(frozen=True)
class MultiRound(AnyTree):
    """Multi-round rejection sampling; the distribution of the output is the target's.

    Attributes:
        replacement: whether siblings are independent draws from q. Without (the default) they are distinct, and no
            chance is wasted on a token that was rejected before.

    Deterministic drafts are tried against what is left of p: each is accepted with its probability there.
    """

    replacement: bool = False
    guarantee: Guarantee = dataclasses.field(default="distribution-exact", init=False)

    @property
    def drawn(self) -> Drawn:
        return "independent" if self.replacement else "distinct"

    def __call__(self, policy: Any, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        log_p = policy.log_probs()
        node, left = walk(self, policy, s, tree, jnp.exp(log_p))
        # what rounding leaves empty was p = q all over: no rejection but by rounding, and p is the right limit
        here = take(log_p, node[:, None])[:, 0]
        last = jnp.where(left.sum(-1, keepdims=True) > 0, jnp.log(left), here)
        last = jnp.where(jnp.isnan(here).any(-1, keepdims=True), here, last)
        predicts = jnp.take_along_axis(policy.predicts, node[:, None], 1)
        own = draw(last[:, None], keys.uniforms(s.key, predicts, Purpose.RESIDUAL))[:, 0]
        depth = jnp.take_along_axis(jnp.broadcast_to(tree.depth, tree.tokens.shape), node[:, None], 1)[:, 0]
        return path_to(tree, node), depth, own

    def trial(self, p: Array, q: Array | None, token: Array, u: Array) -> tuple[Array, Array, Array | None]:
        """One child against what is left: `f32[V]` (sums to at most 1), `f32[V]` or None, `i32[]`, `f32[]`.

        Returns:
            Whether it is accepted, and p and q for the next sibling if it is not.
        """
        V = p.shape[0]
        hit = jnp.arange(V) == token
        if q is None:
            accepted = u * p.sum() < p[token]
            return accepted, jnp.where(hit, 0, p), None
        # p and q are kept unnormalised: their sums come along
        total_p, total_q = p.sum(), q.sum()
        accepted = u * q[token] * total_p < p[token] * total_q
        left = jnp.maximum(p / total_p - q / jnp.where(total_q > 0, total_q, 1), 0)
        return accepted, left, q if self.replacement else jnp.where(hit, 0, q)


def walk(rule: Any, policy: Any, s: State, tree: Tree, p: Array) -> tuple[Array, Array]:
    """Down the tree by `rule.trial`: the last accepted node `i32[B]` and what is left of p there, `f32[B, V]`.

    Args:
        p: `f32[B, 1 + N, V]` the target's probabilities at each node.
    """
    B, size = tree.tokens.shape
    parents = jnp.broadcast_to(tree.parents, (B, size))
    q = None if tree.log_q is None else jnp.exp(tree.log_q)
    nodes = jnp.arange(size, dtype=jnp.int32)
    # each sibling's acceptance has a uniform of its own, by position and rank
    rank = ((parents[:, :, None] == parents[:, None, :]) & (nodes[None, :] < nodes[:, None])).sum(-1)

    def uniform(key: Array, position: Array, rank: Array) -> Array:
        return jax.random.uniform(keys.at(key, position, Purpose.ACCEPT, rank))

    def row(key: Array, parents: Array, rank: Array, live: Array, tokens: Array, predicts: Array, p: Array,
            q: Array | None) -> tuple[Array, Array]:
        at = lambda node: (p[node], None if q is None else q[jnp.minimum(node, q.shape[0] - 1)])

        def unfinished(carry: Any) -> Array:
            return carry[3]

        def visit(carry: Any) -> Any:
            node, last, (left, mass), _ = carry
            open_ = (parents == node) & live & (nodes > last)
            child = jnp.argmax(open_).astype(jnp.int32)
            u = uniform(key, predicts[node], rank[child])
            accepted, less, thinner = rule.trial(left, mass, tokens[child], u)
            there = open_.any()
            go = there & accepted
            pick = lambda a, b, c: None if a is None else jnp.where(go, a, jnp.where(there, b, c))
            p_new, q_new = at(child)
            return (jnp.where(go, child, node), jnp.where(there, child, last),
                    (pick(p_new, less, left), pick(q_new, thinner, mass)), there)

        start = (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), at(0), jnp.ones((), bool))
        node, _, (left, _), _ = lax.while_loop(unfinished, visit, start)
        return node, left

    return jax.vmap(row)(s.key, parents, rank, tree.live, tree.tokens, policy.predicts, p, q)
