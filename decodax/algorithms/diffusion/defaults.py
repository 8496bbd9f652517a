"""The default sampler of a model that fills masks, and the block windows and cache that its attention allows."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter, BlockCausal
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import BlockCache, NoCache
from decodax.algorithms.diffusion.policies import Caching
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.common.registry import Needs

MASKED, CACHE = "masked-diffusion", "diffusion-cache"
FILLING: Needs = "a diffusion model"
DIFFUSION: Needs = "a diffusion model and a draft model"


def blocks(adapter: Adapter, block: int | None, default: int = 32) -> tuple[Blocks, Caching]:
    """Block windows and the exact cache that the model's attention allows. `block` may be chosen for models with
    attention in both directions or causal attention; block-causal models have their own."""
    attention = adapter.attention
    if isinstance(attention, BlockCausal):
        if block not in (None, attention.block):
            raise ValueError(f"block: got {block}, the model was trained with blocks of {attention.block}")
        return Blocks(attention.block, aligned=True), BlockCache()
    return Blocks(block or default), BlockCache() if attention.causal else NoCache()


def default(lm: Any) -> MaskedDiffusion:
    """LLaDA's sampler: one position a step, the surest first, in blocks that suit the model."""
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, None)
    return MaskedDiffusion(adapter, windows, caching=caching)
