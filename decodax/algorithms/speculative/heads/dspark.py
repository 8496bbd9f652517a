"""DSpark: a block head with a sequential correction, and chains that end where a rejection is likely (Cheng et al.,
2026).

The Markov head adds a low-rank function of the draft before to the logits of a slot. The confidence head predicts the
probability that the next draft is accepted, from the slot's hidden state and the draft before. A chain ends where the
product of these falls below a threshold. The prediction for a draft does not depend on the draft itself, so a draft
that is kept is still a draw from its distribution, and every verifier keeps its guarantee.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.block import block_draft
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import check_chance, foretold, grow_chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class SurvivalChain(Shape):
    """A chain of the drafts that are all accepted with at least a given probability, as the source predicts it
    (`Answer.chance`).

    Attributes:
        length: largest number of drafts.
        threshold: the probability; 0: all drafts are kept.

    Raises:
        ValueError: a length below 1, a threshold outside [0, 1], or, when the chain grows, a source that predicts none.
    """

    length: int = 7
    threshold: float = 0.3
    branches = False

    def __post_init__(self) -> None:
        at_least(length=self.length)
        check_chance("threshold", self.threshold)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return grow_chain(grower, state, self.length, foretold,
                          lambda f, all_of_them: all_of_them >= self.threshold, unseen=True)


@ALGORITHMS.register("dspark", "DSpark (arXiv 2607.05147)",
                     "Cheng et al. 2026", family="speculative-linear", needs="a trained drafter",
                     guarantee="seed-exact")
def dspark(lm: Any, draft: Any = None, length: Count | None = None, threshold: Share = 0.3,
           verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens in one pass, corrected by the draft before, up to where a rejection is likely.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: largest number of drafts that are verified; None: all that the block predicts.
        threshold: predicted probability that all drafts are accepted below which the chain ends; not used for a head
            without a confidence head. Larger values pay off under load.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = block_draft(lm, draft, "dspark")
    longest = source.within(length)
    cut = threshold if source.head.confidence is not None else None
    return Speculative(source, verify or SeedExact(), Chain(longest) if cut is None else SurvivalChain(longest, cut))
