"""Diffusion Language Models Know the Answer Before Decoding (Li et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.rules.stops import EndOfText, Gap
from decodax.algorithms.diffusion.rules.unmasking import BlockQuota
from decodax.algorithms.diffusion.rules.windows import WholeBlocks
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("prophet", "Diffusion Language Models Know the Answer Before Decoding", "Li et al. 2025",
                     "LLaDA that unmasks everything at once as soon as the answer is sure", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def prophet(lm: Any, block: int = 32, steps: int | None = None, answer: tuple[int, int] | None = None,
            gaps: tuple[float, float, float] = (7.5, 5.0, 2.5), size: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block. `answer`: the first position of the answer behind the prompt, and its length (5 as
    published); None: the whole text."""
    gap = Gap(block if steps is None else steps, block, answer, gaps)
    return MaskedDiffusion(Adapter.of(lm), WholeBlocks(size, block), unmask=BlockQuota(block, steps),
                           stops=(gap, EndOfText()))
