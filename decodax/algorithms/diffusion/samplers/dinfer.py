"""dInfer: An Efficient Inference Framework for Diffusion Language Models (Ma et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.refreshes import Vicinity
from decodax.algorithms.diffusion.defaults import CACHE, FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.shapers import Credit
from decodax.algorithms.diffusion.rules.unmasking import Segments, Threshold
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dinfer-hierarchy", "dInfer: An Efficient Inference Framework for Diffusion Language Models",
                     "Ma et al. 2025", "all sure positions, and one in each run of open ones", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def dinfer_hierarchy(lm: Any, threshold: float = 0.9, low: float = 0.4, block: int | None = None) -> MaskedDiffusion:
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, unmask=Segments(threshold, low), caching=caching)


@ALGORITHMS.register("dinfer-credit", "dInfer: An Efficient Inference Framework for Diffusion Language Models",
                     "Ma et al. 2025", "all sure positions, where a token that stays the likeliest earns credit",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def dinfer_credit(lm: Any, threshold: float = 0.9, alpha: float = 0.7, gamma: float = 0.2, beta: float = 0.8,
                  kept: int = 8, block: int | None = None) -> MaskedDiffusion:
    """`kept`: the number of tokens a position for which credit is kept."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, unmask=Threshold(threshold, slack=1e-5), caching=caching,
                           shaper=Credit(alpha, gamma, beta, kept))


@ALGORITHMS.register("dinfer-vicinity", "dInfer: An Efficient Inference Framework for Diffusion Language Models",
                     "Ma et al. 2025",
                     "all sure positions at once, a dual cache that also recomputes what lies around the block",
                     family=CACHE, needs=FILLING, guarantee="approximate")
def dinfer_vicinity(lm: Any, block: int = 32, threshold: float = 0.9, before: int = 16, after: int = 16,
                    warmup: int = 0) -> MaskedDiffusion:
    """`before`, `after`: recomputed positions around the block. `warmup`: steps at the beginning that score the whole
    text. Where these end after the first block, the authors' code scores the whole text twice more, here once."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=Threshold(threshold, slack=1e-5),
                           caching=Vicinity(before=before, after=after, warmup=warmup))
