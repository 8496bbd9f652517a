"""Multi-round rejection sampling: tests the children of a node one after the other ("Multi-Candidate Speculative
Decoding", Yang et al., 2024). The output has the target's distribution.

A child x is accepted with probability min(1, p(x) / q(x)). After a rejection, p becomes the normalised positive part of
p - q; if children are drawn without replacement, the rejected token is also removed from q. The first accepted child is
the next node. If no child is accepted, the token is drawn from the remaining p. SpecInfer (Miao et al. 2024) draws
children with replacement; MCSD, RSD (Jeon et al. 2024) and Sequoia (Chen et al. 2024) without.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.tree import Drawn
from decodax.algorithms.speculative.verifier import Guarantee
from decodax.algorithms.speculative.verify.walk import SiblingVerifier, certain, residual
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class MultiRound(SiblingVerifier):
    """Multi-round rejection sampling of the children of each node; the output has the target's distribution.

    A deterministic draft is accepted with its probability in what earlier siblings have left of p. A dead child is not
    tested; without replacement, later children were drawn without its token, so it is removed from q.

    Attributes:
        replacement: True: siblings are independent draws from q. False: they are drawn without replacement, so that a
            rejected token is not tested again.
    """

    replacement: bool = False
    guarantee: ClassVar[Guarantee] = "distribution-exact"

    @property
    def drawn(self) -> Drawn:
        return "independent" if self.replacement else "distinct"

    def siblings(self, p: Array, q: Any, tokens: Array, children: Array, dead: Array,
                 u: Array) -> tuple[Array, Array, Array]:
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
def mcsd(draft: Any, branching: tuple[Count, ...] = (4, 2, 2)) -> Speculative:
    """Drafts several candidates at each node with a draft model, drawn without replacement.

    For sampled texts: if the first candidate is rejected, a second or third is often accepted.

    Args:
        draft: the draft model.
        branching: number of children of each node, by level; the paper's k-configuration.
    """
    return Speculative(DraftModel(draft), MultiRound(), Fixed.balanced(*branching))


ALGORITHMS.alias("rsd-c", "mcsd",
                 "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
                 "Jeon et al. 2024", "Draws children without replacement (by Gumbel-top-k) and verifies them by "
                 "recursive rejection, which is multi-round rejection.", family="speculative-tree")
