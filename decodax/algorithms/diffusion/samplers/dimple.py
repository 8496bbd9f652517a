"""Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding (Yu et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache, PrefixCache
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.policies import Score
from decodax.algorithms.diffusion.rules.confident import Confident
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Random
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dimple", "Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding",
                     "Yu et al. 2025", "confident decoding of the whole text, the prompt's entries computed once; a "
                     "template sets the structure", family=MASKED, needs=FILLING, guarantee="approximate")
def dimple(lm: Any, threshold: float = 0.95, steps: int | None = None,
           order: Literal["random", "confidence", "margin", "entropy"] = "random", size: int | None = None,
           prefill: bool = True) -> MaskedDiffusion:
    """`steps`: None: as many as tokens. `order`: the score by which a step unmasks if no position is above the
    threshold; "random" is the authors' "origin", "confidence" their "maskgit_plus". The threshold is on the probability
    in any order. `prefill`: the prompt's entries, except its last token's, are computed in the first forward only.
    Structure priors are given tokens in the canvas: `decodax.infill`."""
    scores: dict[str, Score] = {"random": Random(), "confidence": Confidence(), "margin": Margin(),
                                "entropy": NegEntropy()}
    return MaskedDiffusion(Adapter.of(lm), Whole(size), scores[order], Confident(threshold, steps),
                           caching=PrefixCache(suffix=1) if prefill else NoCache())
