"""A fixed tree that is cut at the depth from which drafting no longer pays (Lu, Zeng, Ma, Yu, Levorato 2024).

This is the dynamic sliced tree of "Improving Multi-candidate Speculative Decoding": topology and mask are those of one
tree, made once, and a round uses its first levels. After each level a decision model predicts whether a rejection is
likely by then; if so, the row drafts no further. The authors train a small network on the draft model's hidden states
for it. Here it is a `Predictor` f of each node's acceptance: a row goes on while the target is likely enough to reach
one of the nodes that would be expanded next, that is, while the sum over them of the product of f down to each is at
least `threshold`.

Since its shape is static, the window has the width of the complete tree; nodes that were not drafted are padding.
Drafting ends with the longest row. Whether a level is drafted depends only on the levels above, so draws are valid and
every verifier keeps its guarantee. A row's tree does not depend on the other rows of the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.fixed_trees import Fixed, GrowthPlan
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.threshold import (
    TOP,
    DraftFeatures,
    Predictor,
    check_chance,
    entropy,
    likeliest,
    probability,
)


@dataclasses.dataclass(frozen=True)
class Sliced(Shape):
    """A fixed tree of which each row drafts the first levels: those that the target is likely to reach, at least one.

    Attributes:
        tree: the complete tree.
        threshold: predicted probability of being reached below which a level is not drafted.
        predictor: predicts the probability that a node is accepted; `place` in its input is the node's level, 0 for the
            first. Default the draft's own probability.

    Raises:
        ValueError: `threshold` outside [0, 1].
    """

    tree: Fixed = Fixed.balanced(4, 2, 1, 1)
    threshold: float = 0.3
    predictor: Predictor = probability

    def __post_init__(self) -> None:
        check_chance("threshold", self.threshold)

    @property
    def length(self) -> int:
        return self.tree.length

    @property
    def branches(self) -> bool:
        return self.tree.branches

    @property
    def least_nodes(self) -> int:
        return self.tree.least_nodes

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        plan = GrowthPlan(self.tree)
        above, rank, real = jnp.asarray(plan.above), jnp.asarray(plan.rank), jnp.asarray(plan.real)
        of = lambda c: (c.tokens, c.live, c.log_q, c.own, entropy(c.log_own), likeliest(c.log_own), c.hidden)
        g, first = grower.start(state, plan.room, plan.fanout)
        found = plan.wide(of(first))
        B = g.tokens.shape[0]

        def ahead(level: Array, found: Any, chance: Array, grows: Array) -> tuple[Array, Array]:
            """Returns the probabilities of reaching the nodes of a level that have children, `f32[B, w]`, and the rows
            that draft the next level, `bool[B]`."""
            _, live, _, log_p, H, top, hidden = found
            up, r = above[level], rank[level]
            hidden = None if hidden is None else hidden[:, up].reshape(-1, hidden.shape[-1])
            features = DraftFeatures(log_p[:, up, r].reshape(-1), H[:, up].reshape(-1), level, hidden,
                                     top[:, up].reshape(-1, TOP))
            f = self.predictor(features).reshape(B, -1)
            path = chance[:, up] * jnp.where(live[:, up, r], f, 0)
            return path, grows & ((path * real[level]).sum(1) >= self.threshold)

        def unfinished(carry: Any) -> Array:
            return (carry[0] < plan.levels) & carry[-1].any()

        def visit(carry: Any) -> Any:
            level, g, found, chance, path, grows = carry
            g, new = grower.expand(g, found[0][:, above[level], rank[level]], above[level], plan.fanout)
            new = new.replace(live=new.live & grows[:, None, None])
            found, chance = plan.put((found, chance), (of(new), path), g.filled)
            return (level + 1, g, found, chance, *ahead(level + 1, found, chance, grows))

        if plan.levels:
            chance = jnp.zeros((B, 1 + plan.room)).at[:, 0].set(1)
            start = jnp.zeros((), jnp.int32)
            carry = (start, g, found, chance, *ahead(start, found, chance, grower.s.running))
            _, g, found, *_ = jax.lax.while_loop(unfinished, visit, carry)
        asked = jnp.arange(1, 1 + plan.room) < g.filled
        return plan.proposal(*found[:3]), g.source, jnp.where(asked, jnp.asarray(plan.nodes), -1)
