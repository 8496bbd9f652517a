"""Accelerating Diffusion Language Model Inference via Efficient KV Caching and Guided Diffusion (Hu et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.refreshes import Frozen
from decodax.algorithms.diffusion.defaults import CACHE, DIFFUSION, FILLING
from decodax.algorithms.diffusion.parallel.product import Agreed, GuidedDiffusion
from decodax.algorithms.diffusion.rules.scores import Position
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Blocks, Sliding
from decodax.common.registry import ALGORITHMS

FLASHDLM = "Accelerating Diffusion Language Model Inference via Efficient KV Caching and Guided Diffusion"


@ALGORITHMS.register("freecache", FLASHDLM, "Hu et al. 2025",
                     "LLaDA with a cache that is never refreshed: blocks freeze as they are done",
                     family=CACHE, needs=FILLING, guarantee="approximate")
def freecache(lm: Any, block: int = 32, steps: int | None = None, suffix: int = 256) -> MaskedDiffusion:
    """FlashDLM's cache without its guided diffusion. `steps`: of a block. `suffix`: positions recomputed, from the
    block's start on."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=Quota(steps), caching=Frozen(suffix))


@ALGORITHMS.register("flashdlm", FLASHDLM, "Hu et al. 2025",
                     "from left to right, what a small autoregressive model would have said too, with FreeCache",
                     family=CACHE, needs=DIFFUSION, guarantee="approximate")
def flashdlm(lm: Any, draft: Any, top: int = 1, relative: float = 0.0, window: int = 128,
             lookahead: int = 32) -> MaskedDiffusion:
    """Guided diffusion with the authors' sliding window. `top`: how many of the autoregressive model's likeliest tokens
    are accepted (1: their "deterministic", more: "topk"). `relative`: the least probability of an accepted token, as a
    share of the likeliest one's ("topk_relative"). `window`: how many positions before the last decided one are
    recomputed, and how many masks behind it; the first forward alone scores what lies further behind. `lookahead`:
    masks judged at once; the authors judge all of the window, and in the first forward all of the text. Their cache
    writes new entries where the window of the forward before began; here each entry is at its own position."""
    if window < 2:
        raise ValueError(f"window: got {window}, takes 2 or more")
    return MaskedDiffusion(Adapter.of(lm), Sliding(min(lookahead, window - 1)), Position(), Agreed(go_on=False),
                           caching=Frozen(window - 1, window + 1, near=True),
                           verify=GuidedDiffusion(draft, top, relative))
