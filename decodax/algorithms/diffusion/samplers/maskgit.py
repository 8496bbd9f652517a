"""MaskGIT: Masked Generative Image Transformer (Chang et al. 2022)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.rules.scores import Confidence, Noisy
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("maskgit", "MaskGIT: Masked Generative Image Transformer", "Chang et al. 2022",
                     "the whole text at once, cosine quotas, confidence with Gumbel noise that fades", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def maskgit(lm: Any, steps: int = 12, choice_temperature: float = 4.5, size: int | None = None) -> MaskedDiffusion:
    """Drawing all open positions and masking the least sure ones again is the same as unmasking the others: see
    `MaskBottom`."""
    score = Noisy(Confidence("policy"), choice_temperature, steps)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, Quota(steps, "cosine"))
