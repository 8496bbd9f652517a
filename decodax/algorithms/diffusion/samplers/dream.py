"""Dream 7B: Diffusion Large Language Models (Ye et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Noisy, Random
from decodax.algorithms.diffusion.rules.unmasking import Ancestral, Quota
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dream", "Dream 7B: Diffusion Large Language Models", "Ye et al. 2025",
                     "the whole text at once, by entropy, margin or confidence under the policy, quotas along the "
                     "noise schedule", family=MASKED, needs=FILLING, guarantee="approximate")
def dream(lm: Any, steps: int = 64, order: Literal["entropy", "margin", "confidence", "random"] = "entropy",
          order_temperature: float = 0.0, size: int | None = None) -> MaskedDiffusion:
    """`order_temperature` is Dream's `alg_temp`; order "random" is its "origin". A step may decide nothing, as `Quota`
    says.

    Scores are those of the policy: `generate(top_p=..., temperature=0)` filters the distributions that they see, as in
    the authors' code. If top-k is given too, it is applied before top-p (in the authors' code after it).
    """
    scores: dict[str, Score] = {"entropy": NegEntropy("policy"), "margin": Margin("policy"), "random": Random(),
                                "confidence": Confidence("policy", log=False)}
    score = scores[order]
    if order_temperature:
        score = Noisy(score, order_temperature)
    unmask: Unmask = Ancestral(steps, eps=1e-3) if order == "random" else Quota(steps, "time")
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, unmask)
