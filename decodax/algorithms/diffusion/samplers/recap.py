"""Plug-and-Play Context Feature Reuse for Efficient Masked Generation (Liu et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.reuse import FullStepOrder, Targets, Turns
from decodax.algorithms.diffusion.defaults import CACHE, FILLING
from decodax.algorithms.diffusion.policies import Score
from decodax.algorithms.diffusion.rules.scores import Confidence, Noisy, Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("recap", "Plug-and-Play Context Feature Reuse for Efficient Masked Generation", "Liu et al. 2025",
                     "MaskGIT whose full steps choose targets, and whose local steps compute these alone", family=CACHE,
                     needs=FILLING, guarantee="approximate")
def recap(lm: Any, steps: int = 24, every: int = 2, lead: int = 0,
          order: Literal["random", "confidence"] = "confidence", choice_temperature: float = 5.5,
          schedule: Literal["power", "cosine"] = "power", size: int | None = None,
          packed: tuple[int, ...] = ()) -> MaskedDiffusion:
    """`every`: steps from one full step to the next, after the first `lead` full ones (the authors' `num_cache_iters`
    plus 1, and their `pre_full_iters`). `schedule`: of the quotas; "power" is the authors'. `order`: "confidence" has
    Gumbel noise of `choice_temperature`, which fades; "random" is MAR's. `packed`: see `Targets`."""
    turns, quota = Turns(every, lead), Quota(steps, schedule)
    score: Score = Random() if order == "random" else \
        Noisy(Confidence("policy"), choice_temperature, steps) if choice_temperature else Confidence("policy")
    return MaskedDiffusion(Adapter.of(lm), Whole(size), FullStepOrder(score, turns), quota,
                           caching=Targets(quota, score, turns, packed))
