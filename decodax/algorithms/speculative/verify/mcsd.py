"""Multi-round rejection sampling: tests the children of a node one after the other ("Multi-Candidate Speculative
Decoding", Yang et al., 2024). The output keeps the target's distribution.

At a node the children are tried in turn: one is accepted with probability min(1, p(x) / q(x)); after a rejection the
target becomes the normalised positive part of p - q, and, where children are drawn without replacement, the rejected
token leaves q. The first accepted child is the next node; if none is, the token comes from what is left of p.
SpecInfer (Miao et al. 2024) draws children with replacement; MCSD, RSD (Jeon et al. 2024) and Sequoia (Chen et al.
2024) without.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.tree import Drawn, Tree
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.walk import certain, residual, walk
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True)
class MultiRound(Verifier):
    """Multi-round rejection sampling; the distribution of the output is the target's.

    Attributes:
        replacement: True if siblings are independent draws from q. By default they are distinct, so that no token that
            was rejected before is tried again.

    Deterministic drafts are tried against what is left of p: each is accepted with its probability there. A dead child
    is not tried. Without replacement the children after it were drawn without its token, which leaves q.
    """

    replacement: bool = False
    guarantee: ClassVar[Guarantee] = "distribution-exact"

    @property
    def drawn(self) -> Drawn:
        return "independent" if self.replacement else "distinct"

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return walk(self.siblings, dist, s, tree)

    def siblings(self, p: Array, q: Any, tokens: Array, children: Array, dead: Array,
                 u: Array) -> tuple[Array, Array, Array]:
        """See `decodax.algorithms.speculative.verify.walk.Siblings`."""
        if q is None:
            return certain(p, tokens, children, u)
        if callable(q) and not self.replacement:
            raise ValueError("verify: these drafts are draws of several sources; takes MultiRound(replacement=True)")
        place, drawn = jnp.arange(tokens.shape[0]), (children | dead) & (tokens >= 0)

        def untried(carry: Any) -> Array:
            _, accepted, _, children = carry
            return ~accepted & children.any()

        def attempt(carry: Any) -> Any:
            _, _, p, children = carry
            child = jnp.argmax(children)
            token = tokens[child]
            here = q(child) if callable(q) else q
            if not self.replacement:        # what was drawn before it, tried or dead, had left q
                gone = jnp.where(drawn & (place < child), tokens, here.shape[0])
                here = here.at[gone].set(0, mode="drop")
            # p and q are kept unnormalised: what is left of them sums to less than 1
            P, Q = p.sum(), here.sum()
            accepted = u[child] * here[token] * P < p[token] * Q
            left = residual(p / jnp.where(P > 0, P, 1) - here / jnp.where(Q > 0, Q, 1), p)
            return child, accepted, jnp.where(accepted, p, left), children.at[child].set(False)

        start = (jnp.argmax(children), jnp.zeros((), bool), p, children)
        child, accepted, left, _ = lax.while_loop(untried, attempt, start)
        return child, accepted, left


@ALGORITHMS.register("mcsd", "Multi-Candidate Speculative Decoding", "Yang et al. 2024", family="speculative-tree",
                     needs="a draft model", guarantee="distribution-exact")
def mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 2)) -> Speculative:
    """Drafts several candidates at each node with a draft model, drawn without replacement.

    For sampled texts: a second and third candidate catch many of the rejections of a chain.

    Args:
        draft: the draft model.
        branching: number of children of each node, level by level; the paper's k-configuration.
    """
    return Speculative(DraftModel(draft), MultiRound(), Fixed.balanced(*branching))


ALGORITHMS.alias("rsd-c", "mcsd",
                 "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
                 "Jeon et al. 2024", "Draws children without replacement (by Gumbel-top-k) and verifies them by "
                 "recursive rejection, which is multi-round rejection.", family="speculative-tree")
