"""What the entries of published samplers share.

A maker takes the loaded model first (its `diffusion` says how it reads a canvas) and returns a `MaskedDiffusion`; its
other arguments are the system's options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter, BlockCausal
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import BlockCache, NoCache
from decodax.algorithms.diffusion.policies import Caching
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.common import registry
from decodax.common.registry import DIFFUSION, FILLING, Guarantee

MASKED, CACHE = "masked-diffusion", "diffusion-cache"


def entry(name: str, title: str, authors: str, summary: str, family: str = MASKED,
          guarantee: Guarantee = "approximate", draft: bool = False
          ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`decodax.entry` with the defaults of a sampler of masked diffusion.

    Args:
        guarantee: "seed-exact" where the output is that of the sampler that it speeds up, token for token.
        draft: whether the maker takes a second model, of that name, after the first.
    """
    return registry.entry(name, title, authors, family, summary, DIFFUSION if draft else FILLING, guarantee)


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
