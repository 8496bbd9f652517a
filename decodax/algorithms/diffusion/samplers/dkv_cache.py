"""dKV-Cache: The Cache for Diffusion Language Models (Ma et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.refreshes import DelayedTokens, DKVCacheGreedy
from decodax.algorithms.diffusion.defaults import CACHE, FILLING
from decodax.algorithms.diffusion.rules.scores import Confidence, Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dkv-cache", "dKV-Cache: The Cache for Diffusion Language Models", "Ma et al. 2025",
                     "LLaDA whose tokens enter the cache a step after they were decided", family=CACHE, needs=FILLING,
                     guarantee="approximate")
def dkv_cache(lm: Any, variant: Literal["decode", "greedy"] = "decode", block: int = 32, steps: int | None = None,
              refresh: int | None = None, window: int = 4, packed: tuple[int, ...] | None = None) -> MaskedDiffusion:
    """`steps`: of a block. `refresh`: steps from one wide forward to the next; None: 8, for "greedy" 2. `window`: open
    positions that "greedy" recomputes beside each one that it decides. `packed`: sizes of narrow forwards; None: 64 and
    128 for "decode", and for "greedy", whose order is random, what a step takes."""
    a, quota = Adapter.of(lm), Quota(steps)
    if variant == "greedy":
        most = (-(-block // steps) if steps else 1) * (2 + window + a.shift)
        greedy = DKVCacheGreedy(quota, window, refresh or 2, (most,) if packed is None else packed)
        return MaskedDiffusion(a, Blocks(block), Random(once=True), quota, caching=greedy)
    return MaskedDiffusion(a, Blocks(block), Confidence(), quota,
                           caching=DelayedTokens(1, refresh or 8, (64, 128) if packed is None else packed))
