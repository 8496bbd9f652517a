"""dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching (Liu et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.features import Similarity
from decodax.algorithms.diffusion.defaults import CACHE, FILLING
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dllm-cache", "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching",
                     "Liu et al. 2025", "LLaDA that recomputes, layer by layer, the tokens whose values changed most",
                     family=CACHE, needs=FILLING, guarantee="approximate")
def dllm_cache(lm: Any, block: int = 32, steps: int | None = None, prompt: int = 50, response: int = 7,
               ratio: float = 0.25, size: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block. `prompt`, `response`: the intervals at which their entries are refreshed. `ratio`: the share
    of the response's tokens that are recomputed in between."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=Quota(steps),
                           caching=Similarity(prompt, response, ratio, size))
