"""SpecDec++: a chain that ends when a rejection of some draft is likely ("SpecDec++: Boosting Speculative Decoding via
Adaptive Candidate Lengths", Huang, Guo, Wang, 2024): `1 - prod f_j > h`, where `f_j` is the predicted probability that
draft `j` is accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from decodax.algorithms.speculative.adaptive.predictor import given_or_fitted
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import Predictor, chances, check_chance, grow_chain, probability
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class RiskThreshold(Shape):
    """A chain that ends when the predicted probability that some draft is rejected exceeds a threshold.

    Attributes:
        length: largest number of drafts.
        threshold: probability of a rejection above which the chain ends, `h` in the paper.
        predictor: predicts the probability that a draft is accepted; default the draft's own probability.

    Raises:
        ValueError: a length below 1, or `threshold` outside [0, 1].
    """

    length: int = 20
    threshold: float = 0.3
    predictor: Predictor = probability
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
def specdec_plus_plus(lm: Any, draft: Any, length: Count = 12, threshold: Share = 0.7,
                      predictor: Predictor | None = None, samples: Any = None) -> Speculative:
    """Drafts with a draft model until it is likely that some draft will be rejected.

    The predictor is a logistic regression on five features of a draft (in the paper a head on the draft model's hidden
    states). Give it, or samples to fit it to.

    Args:
        lm: the target.
        draft: the draft model.
        length: largest number of drafts in a round.
        threshold: predicted probability of a rejection above which the chain ends.
        predictor: a result of `decodax.train.fit_predictor`.
        samples: prompts as token ids, to fit a predictor to.
    """
    found = given_or_fitted("specdec++", lm, draft, predictor, samples, rejected=6.0)
    return Speculative(DraftModel(draft), shape=RiskThreshold(length, threshold, found))
