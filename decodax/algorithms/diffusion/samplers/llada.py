"""Large Language Diffusion Models (Nie et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.remasking import Edit
from decodax.algorithms.diffusion.rules.scores import Confidence, Random
from decodax.algorithms.diffusion.rules.unmasking import AtLeast, Quota, Threshold
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("llada", "Large Language Diffusion Models", "Nie et al. 2025",
                     "blocks from left to right, so many tokens a step, the surest or random ones", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def llada(lm: Any, block: int | None = None, steps: int | None = None,
          order: Literal["confidence", "random"] = "confidence") -> MaskedDiffusion:
    """`steps`: of a block; None: one for each position."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, Random() if order == "random" else Confidence(), Quota(steps), caching=caching)


@ALGORITHMS.register("llada2", "LLaDA2.0: Scaling Up Diffusion Language Models to 100B", "Bie et al. 2025",
                     "sure positions or the step's quota, whichever is more, exact block cache", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def llada2(lm: Any, threshold: float = 0.95, steps: int | None = 32, block: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block. The quotas divide the whole block, even if it begins with tokens of the prompt."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    quota = Quota(None if steps is None else min(steps, windows.block), "width")
    return MaskedDiffusion(a, windows, unmask=AtLeast(Threshold(threshold, strict=True), quota), caching=caching)


@ALGORITHMS.register("llada2.1", "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", "Bie et al. 2026",
                     "LLaDA 2 that also overwrites decided tokens", family=MASKED, needs=FILLING,
                     guarantee="approximate")
def llada2_1(lm: Any, threshold: float = 0.7, edit: float = 0.5, most: int = 16,
             block: int | None = None) -> MaskedDiffusion:
    """`edit`: a token is replaced by another one above this probability. `most`: editing steps of a block without open
    positions, after which the end of the text is searched. A step in which nothing reaches the `threshold` unmasks one
    position."""
    return dataclasses.replace(llada2(lm, threshold, None, block), remask=Edit(edit, most))
