"""Rejection sampling of a tree, sibling by sibling.

At a node the children are tried in turn: one is accepted with probability min(1, p(x) / q(x)); after a rejection the
target becomes the normalised positive part of p - q, and, where children are drawn without replacement, the rejected
token leaves q. The first accepted child is the next node; if none is, the token comes from what is left of p.
SpecInfer (Miao et al. 2024) with replacement; MCSD (Yang et al. 2024), RSD (Jeon et al. 2024) and Sequoia (Chen et al.
2024) without.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from decodax.core.state import State
from decodax.speculative.tree import Drawn, Tree
from decodax.speculative.verify.base import Guarantee
from decodax.speculative.verify.walk import certain, residual, walk


@dataclasses.dataclass(frozen=True)
class MultiRound:
    """Multi-round rejection sampling; the distribution of the output is the target's.

    Attributes:
        replacement: whether siblings are independent draws from q. Without (the default) they are distinct, and no
            chance is wasted on a token that was rejected before.

    Deterministic drafts are tried against what is left of p: each is accepted with its probability there. A dead child
    is not tried. Without replacement it still has had its part in what the children behind it were drawn from: its
    token leaves q.
    """

    replacement: bool = False
    guarantee: ClassVar[Guarantee] = "distribution-exact"

    @property
    def drawn(self) -> Drawn:
        return "independent" if self.replacement else "distinct"

    def __call__(self, policy: Any, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return walk(self.siblings, policy, s, tree)

    def siblings(self, p: Array, q: Array | None, tokens: Array, children: Array, dead: Array,
                 u: Array) -> tuple[Array, Array, Array]:
        """See `decodax.speculative.verify.walk.Siblings`."""
        if q is None:
            return certain(p, tokens, children, u)

        place = jnp.arange(tokens.shape[0])
        without = lambda q, gone: q.at[jnp.where(gone & (tokens >= 0), tokens, q.shape[0])].set(0, mode="drop")

        def untried(carry: Any) -> Array:
            _, accepted, _, _, children = carry
            return ~accepted & children.any()

        def attempt(carry: Any) -> Any:
            _, _, p, q, children = carry
            child = jnp.argmax(children)
            token = tokens[child]
            if not self.replacement:
                q = without(q, dead & (place < child))
            # p and q are kept unnormalised: what is left of them sums to less than 1
            P, Q = p.sum(), q.sum()
            accepted = u[child] * q[token] * P < p[token] * Q
            left = residual(p / jnp.where(P > 0, P, 1) - q / jnp.where(Q > 0, Q, 1), p)
            q = q if self.replacement else without(q, place == child)
            return child, accepted, jnp.where(accepted, p, left), q, children.at[child].set(False)

        start = (jnp.argmax(children), jnp.zeros((), bool), p, q, children)
        child, accepted, left, _, _ = lax.while_loop(untried, attempt, start)
        return child, accepted, left
