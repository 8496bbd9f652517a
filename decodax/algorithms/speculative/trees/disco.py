"""DISCO: a fitted predictor decides when the draft ends ("Accelerating Speculative Decoding using Dynamic Speculation
Length", Mamou et al., 2024)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.adaptive.predictor import fit_predictor, given_or_fitted
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.trees.confidence_threshold import ConfidenceChain
from decodax.algorithms.speculative.trees.threshold import Predictor
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("disco", "Accelerating Speculative Decoding using Dynamic Speculation Length", "Mamou et al. 2024",
                     family="speculative-linear", needs="a draft model and samples", guarantee="seed-exact")
def disco(lm: Any, draft: Any, length: Count = 12, threshold: Share = 0.4, predictor: Predictor | None = None,
          samples: Any = None) -> Speculative:
    """Drafts with a draft model until a fitted predictor expects that a draft will be rejected.

    The predictor is a network with two layers that reads the probabilities of the draft and of the likeliest tokens,
    the entropy and the place in the chain. Give it, or samples to train it on.

    Args:
        lm: the target.
        draft: the draft model.
        length: largest number of drafts in a round.
        threshold: predicted probability of acceptance below which the chain ends.
        predictor: a result of `decodax.train.fit_predictor`.
        samples: prompts as token ids, to train a predictor on.
    """
    found = given_or_fitted("disco", "predictor", fit_predictor, predictor, samples, lm, DraftModel(draft))
    return Speculative(DraftModel(draft), shape=ConfidenceChain(length, threshold, found))
