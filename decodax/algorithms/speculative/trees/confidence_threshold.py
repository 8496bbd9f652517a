"""A chain that ends at the first uncertain draft: assisted generation with a confidence threshold (Gante, 2023; Joao et
al., 2024).

With the default predictor, the draft's own probability, the threshold is `assistant_confidence_threshold` of
transformers. With a fitted predictor the shape is that of DISCO.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import Predictor, chances, check_chance, grow_chain, probability
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class ConfidenceChain(Shape):
    """A chain that ends after the first draft whose predicted probability of acceptance is below a threshold.

    Attributes:
        length: largest number of drafts.
        threshold: probability of acceptance below which the chain ends.
        predictor: predicts the probability that a draft is accepted; default the draft's own probability; None: what
            the source itself predicts (`Answer.chance`).

    Raises:
        ValueError: a length below 1, or `threshold` outside [0, 1].
    """

    length: int = 20
    threshold: float = 0.4
    predictor: Predictor | None = probability
    branches = False

    def __post_init__(self) -> None:
        at_least(length=self.length)
        check_chance("threshold", self.threshold)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return grow_chain(grower, state, self.length, chances(self.predictor),
                          lambda f, all_of_them: f >= self.threshold)


@ALGORITHMS.register("confidence-threshold", "Assisted generation with a confidence threshold",
                     "Gante 2023; Joao et al. 2024", family="speculative-linear", needs="a draft model",
                     guarantee="seed-exact")
def confidence_threshold(draft: Any, length: Count = 12, threshold: Share = 0.4) -> Speculative:
    """Drafts with a draft model until its first uncertain token.

    Chains are long where the text is easy and short where it is not, and nothing has to be fitted.

    Args:
        draft: the draft model.
        length: largest number of drafts in a round.
        threshold: probability of a draft below which the chain ends.
    """
    return Speculative(DraftModel(draft), shape=ConfidenceChain(length, threshold))
