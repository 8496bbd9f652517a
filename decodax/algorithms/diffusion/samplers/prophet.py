"""Prophet: an early stop as soon as the answer is certain ("Diffusion Language Models Know the Answer Before Decoding",
Li et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Memory, Stepped, Stop
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.rules.unmasking import BlockQuota
from decodax.algorithms.diffusion.rules.windows import WholeBlocks
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Gap(Stepped, Stop):
    """Stops early: unmasks all remaining positions as soon as the answer is certain.

    The answer counts as certain when the gap between the two largest logits, averaged over the answer's positions,
    reaches a threshold. The threshold falls with progress, the share of all planned steps that are done: `gaps[0]`
    below 0.33, `gaps[1]` below 0.67, then `gaps[2]` (the limits of the authors' code).

    Attributes:
        steps: number of steps for each block.
        block: number of positions of a block.
        answer: `(first, length)` of the answer in tokens, counted from the end of the prompt. None: the answer is the
            whole text after the prompt.
        gaps: thresholds for the first, second and last third of the steps.
    """

    steps: int
    block: int
    answer: tuple[int, int] | None = None
    gaps: tuple[float, float, float] = (7.5, 5.0, 2.5)

    def __post_init__(self) -> None:
        if self.answer is not None and (self.answer[0] < 0 or self.answer[1] < 1):
            raise ValueError(f"answer: got {self.answer}, takes a first position from 0 on and a length from 1 on")

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        watched = view.editable if self.answer is None else view.positions >= view.prompt_length[:, None]
        watched = watched & view.inside & seen.reached
        if self.answer is not None:
            offset = view.positions - view.prompt_length[:, None] - self.answer[0]
            watched = watched & (offset >= 0) & (offset < self.answer[1])
        count = watched.sum(1)
        gap = jnp.where(watched, seen.model.gap, 0).sum(1) / jnp.maximum(count, 1)
        blocks = -(-(view.end - view.start) // self.block)
        progress = (view.step + 1) / jnp.maximum(self.steps * blocks, 1)
        early, middle, late = self.gaps
        bar = jnp.where(progress < 0.33, early, jnp.where(progress < 0.67, middle, late))
        return (count > 0) & (gap >= bar)


@ALGORITHMS.register("prophet", "Diffusion Language Models Know the Answer Before Decoding", "Li et al. 2025",
                     family="masked-diffusion", needs="a diffusion model")
def prophet(lm: Any, block_length: Count = 32, steps: Count | None = None, answer: tuple[Whole, Count] | None = None,
            gaps: tuple[float, float, float] = (7.5, 5.0, 2.5), size: Count | None = None) -> MaskedDiffusion:
    """LLaDA's sampler that unmasks all remaining positions as soon as the answer is certain.

    For tasks with a short answer at a known place.

    Args:
        block_length: number of positions of a block.
        steps: number of steps of a block. None: one position per step.
        answer: first position of the answer, counted from the end of the prompt, and its length (5 as published). None:
            the whole text.
        gaps: gap between the two largest logits, averaged over the answer's positions, from which the answer is
            certain, in each third of the steps.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    gap = Gap(block_length if steps is None else steps, block_length, answer, gaps)
    return MaskedDiffusion(Adapter.of(lm), WholeBlocks(size, block_length), unmask=BlockQuota(block_length, steps),
                           stops=(gap, EndOfText()))
