"""AdaEAGLE: a small network predicts before each round how many tokens to draft ("AdaEAGLE: Optimizing Speculative
Decoding via Explicit Modeling of Adaptive Draft Structures", Zhang et al., 2024).

The network reads the target's hidden state from which the newest token was drawn. The paper drafts with EAGLE's head;
that of EAGLE-3 does as well. Its widths and training are ours (`decodax.train.fit_draft_length`). As in the paper, a
threshold may end a chain before the predicted length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.adaptive.fit_stoppers import fit_draft_length
from decodax.algorithms.speculative.adaptive.predictor import given_or_fitted
from decodax.algorithms.speculative.adaptive.stoppers import DraftLength
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.dspark import SurvivalChain
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Grower
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.confidence_threshold import ConfidenceChain
from decodax.algorithms.speculative.trees.threshold import foretold, grow_chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS

SYSTEMS = ("eagle", "hass", "eagle-3")


@dataclasses.dataclass(frozen=True)
class SurePrediction(SurvivalChain):
    """A chain that ends at the length that the source predicts (`DraftLength`), or before it, after the first draft at
    which the product of the probabilities of the source's likeliest tokens is below `threshold`."""

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        # beyond the predicted length the source's own prediction is 0, and with it the product
        sure = lambda child, index: foretold(child, index) * jnp.exp(child.log_own[:, 0].max(-1))
        return grow_chain(grower, state, self.length, sure,
                          lambda f, all_of_them: (f > 0) & (all_of_them >= self.threshold))


@ALGORITHMS.register("adaeagle", "AdaEAGLE: Optimizing Speculative Decoding via Explicit Modeling of Adaptive Draft "
                     "Structures", "Zhang et al. 2024", family="speculative-linear",
                     needs="a trained drafter and samples", drafters=SYSTEMS, guarantee="seed-exact")
def adaeagle(lm: Any, draft: Any = None, length: Count = 8, network: Any = None, samples: Any = None,
             verify: Verifier | None = None, threshold: Share | None = None) -> Speculative:
    """Drafts as many tokens with EAGLE's head as a small network on the target's hidden state predicts to be accepted.

    Args:
        lm: the target.
        draft: a drafter of "eagle", "hass" or "eagle-3" from `decodax.load_drafter`; None: the one shipped for the
            target, if any.
        length: largest number of drafts in a round.
        network: a result of `decodax.train.fit_draft_length`.
        samples: prompts as token ids, to train a network on.
        verify: the rule that accepts drafts; None: seed-exact.
        threshold: product of the probabilities of the head's likeliest tokens below which a chain ends before the
            predicted length; None: it never does.
    """
    source = trained(lm, draft, *SYSTEMS)
    network = given_or_fitted("adaeagle", "network", fit_draft_length, network, samples, lm, source)
    shape = ConfidenceChain(length, 0.5, None) if threshold is None else SurePrediction(length, threshold)
    return Speculative(DraftLength(source, network), verify or SeedExact(), shape)
