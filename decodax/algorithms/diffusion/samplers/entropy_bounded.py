"""Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking (Ben-Hamu et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.policies import Score
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy
from decodax.algorithms.diffusion.rules.unmasking import EntropyBound
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("entropy-bounded",
                     "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
                     "Ben-Hamu et al. 2025", "as many positions as an entropy budget allows", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def entropy_bounded(lm: Any, bound: float = 0.1, block: int | None = None,
                    order: Literal["entropy", "confidence", "margin"] = "entropy") -> MaskedDiffusion:
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    scores: dict[str, Score] = {"entropy": NegEntropy(), "confidence": Confidence(), "margin": Margin()}
    return MaskedDiffusion(a, windows, scores[order], EntropyBound(bound), caching=caching)
