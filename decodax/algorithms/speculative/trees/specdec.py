"""SpecDec++: a chain that ends when a rejection of some draft is likely ("SpecDec++: Boosting Speculative Decoding via
Adaptive Candidate Lengths", Huang, Guo, Wang, 2024): `1 - prod f_j > h`, where `f_j` is the predicted probability that
draft `j` is accepted. As in the authors' code, `f_j` comes from the hidden state of draft `j`, which is known when the
next one has been drafted, so the draft after the last `f_j` is verified too."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from decodax.algorithms.speculative.adaptive.fit_stoppers import fit_acceptance_head
from decodax.algorithms.speculative.adaptive.predictor import given_or_fitted
from decodax.algorithms.speculative.adaptive.stoppers import AcceptanceHead
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import Predictor, chances, check_chance, grow_chain, probability
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class RiskThreshold(Shape):
    """A chain that ends when the predicted probability that some draft is rejected exceeds a threshold.

    Attributes:
        length: largest number of drafts.
        threshold: probability of a rejection above which the chain ends, `h` in the paper.
        predictor: predicts the probability that a draft is accepted; default the draft's own probability; None: what
            the source itself predicts for the draft before (`Answer.chance`).

    Raises:
        ValueError: a length below 1, or `threshold` outside [0, 1].
    """

    length: int = 20
    threshold: float = 0.3
    predictor: Predictor | None = probability
    branches = False

    def __post_init__(self) -> None:
        at_least(length=self.length)
        check_chance("threshold", self.threshold)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return grow_chain(grower, state, self.length, chances(self.predictor),
                          lambda f, all_of_them: 1 - all_of_them <= self.threshold)


@ALGORITHMS.register("specdec++", "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths",
                     "Huang et al. 2024", family="speculative-linear", needs="a draft model and samples",
                     guarantee="seed-exact")
def specdec_plus_plus(lm: Any, draft: Any, length: Count = 12, threshold: Share = 0.7, head: Any = None,
                      samples: Any = None, verify: Verifier | None = None) -> Speculative:
    """Drafts with a draft model until it is likely that some draft will be rejected.

    A head on the draft model's hidden states predicts whether its newest token is accepted. Give the head, or samples
    to train it on. It is trained on the probability with which the paper's rule, `dx.verify.Rejection()`, accepts.

    Args:
        lm: the target.
        draft: the draft model.
        length: largest number of drafts in a round.
        threshold: predicted probability of a rejection above which the chain ends.
        head: a result of `decodax.train.fit_acceptance_head`.
        samples: prompts as token ids, to train a head on.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    head = given_or_fitted("specdec++", "head", fit_acceptance_head, head, samples, lm, draft)
    return Speculative(AcceptanceHead(DraftModel(draft), head), verify or SeedExact(),
                       RiskThreshold(length, threshold, None))
