"""Dream: fills the whole text at once, with quotas along the noise schedule ("Dream 7B: Diffusion Large Language
Models", Ye et al., 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Noisy, Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.samplers.mdlm import Ancestral
from decodax.common.options import Count, NonNegative
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dream", "Dream 7B: Diffusion Large Language Models", "Ye et al. 2025", family="masked-diffusion",
                     needs="a diffusion model")
def dream(lm: Any, steps: Count = 64, alg: Literal["entropy", "topk_margin", "maskgit_plus", "origin"] = "entropy",
          alg_temp: NonNegative = 0.0, size: Count | None = None) -> MaskedDiffusion:
    """Unmasks positions of the whole text by entropy, margin or confidence, with quotas along the noise schedule.

    A step may decide nothing, since its quota is rounded down (`Quota`). Scores are those of the filtered
    distributions: `generate(top_p=..., temperature=0)` changes the scores, as in the authors' code. If top-k is given
    too, it is applied before top-p (in the authors' code after it).

    Args:
        steps: number of steps for the whole text.
        alg: order of unmasking, with the authors' names: "entropy", "topk_margin", "maskgit_plus" (confidence) or
            "origin" (each position at a random time).
        alg_temp: scale of Gumbel noise on the order; 0: no noise.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    scores: dict[str, Score] = {"entropy": NegEntropy("policy"), "topk_margin": Margin("policy"), "origin": Random(),
                                "maskgit_plus": Confidence("policy", log=False)}
    score = Noisy(scores[alg], alg_temp) if alg_temp else scores[alg]
    unmask: Unmask = Ancestral(steps, eps=1e-3) if alg == "origin" else Quota(steps, "time")
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, unmask)
