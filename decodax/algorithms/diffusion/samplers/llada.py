"""LLaDA, LLaDA 2.0 and 2.1: blocks from left to right, and in each step the most confident positions of a block ("Large
Language Diffusion Models", Nie et al., 2025, and its successors by Bie et al., 2025 and 2026).

LLaDA unmasks a fixed quota per step. LLaDA 2.0 unmasks all confident positions, or the quota if these are fewer. LLaDA
2.1 also overwrites decided tokens. Only the last two need block-causal models.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Memory, Remask
from decodax.algorithms.diffusion.rules.scores import Confidence, Random
from decodax.algorithms.diffusion.rules.unmasking import AtLeast, Quota, Threshold, reaches
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Share
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Edit(Remask):
    """Replaces a decided token by another candidate whose probability is above `threshold` (LLaDA 2.1).

    A window without open positions is edited until no token changes, for at most `most` more steps.
    """

    threshold: float = 0.9
    most: int = 16

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        sure = reaches(seen, "model", "confidence", self.threshold, strict=True) & seen.reached & (seen.token >= 0)
        edit = before.unmasked & sure
        return after.replace(tokens=jnp.where(edit, seen.token, after.tokens))

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        changed = (before.editable & before.inside & (before.tokens != after.tokens)).any(1)
        return changed & (after.full < self.most)


@ALGORITHMS.register("llada", "Large Language Diffusion Models", "Nie et al. 2025", family="masked-diffusion",
                     needs="a diffusion model")
def llada(lm: Any, block_length: Count | None = None, steps: Count | None = None,
          remasking: Literal["low_confidence", "random"] = "low_confidence") -> MaskedDiffusion:
    """Fills blocks from left to right, a fixed number of tokens per step, the most confident first.

    The default for every diffusion model. Fewer steps are faster, with a lower quality.

    Args:
        block_length: number of positions of a block. None: the model's, or 32.
        steps: number of steps of a block. None: one position per step.
        remasking: order of unmasking: "low_confidence": the most confident positions first; "random": in random order.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    score = Random() if remasking == "random" else Confidence()
    return MaskedDiffusion(adapter, windows, score, Quota(steps), caching=caching)


@ALGORITHMS.register("llada2", "LLaDA2.0: Scaling Up Diffusion Language Models to 100B", "Bie et al. 2025",
                     family="masked-diffusion", needs="a diffusion model")
def llada2(lm: Any, threshold: Share = 0.95, steps: Count | None = 32,
           block_length: Count | None = None) -> MaskedDiffusion:
    """Unmasks all confident positions of a block or the step's quota, whichever is more, with an exact block cache.

    The quotas divide the whole block, even if it begins with tokens of the prompt.

    Args:
        threshold: probability above which a candidate is unmasked.
        steps: number of steps of a block, for the quota. None: one position per step.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    quota = Quota(None if steps is None else min(steps, windows.block), "width")
    return MaskedDiffusion(adapter, windows, unmask=AtLeast(Threshold(threshold, strict=True), quota), caching=caching)


@ALGORITHMS.register("llada2.1", "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", "Bie et al. 2026",
                     family="masked-diffusion", needs="a diffusion model")
def llada2_1(lm: Any, threshold: Share = 0.7, editing_threshold: Share = 0.5, max_post_steps: WholeNumber = 16,
             block_length: Count | None = None) -> MaskedDiffusion:
    """LLaDA 2 that also overwrites decided tokens.

    Allows a lower threshold, since early errors are edited. A step in which no candidate is above the threshold unmasks
    one position.

    Args:
        threshold: probability above which a candidate is unmasked.
        editing_threshold: probability above which another candidate replaces a decided token.
        max_post_steps: maximum number of editing steps of a block without open positions.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    sampler = llada2(lm, threshold, None, block_length)
    return dataclasses.replace(sampler, remask=Edit(editing_threshold, max_post_steps))
