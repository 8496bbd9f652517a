"""Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models (Wu and Zhang
2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter, Full
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import DualCache, PrefixCache
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.parallel.branches import BranchExact, BranchLater
from decodax.algorithms.diffusion.policies import Unmask, Verify
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Quota, Threshold
from decodax.common.registry import ALGORITHMS

Cache = Literal["none", "prefix", "dual"]

FREEDAVE = "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models"


def _verified(lm: Any, verify: Verify, unmask: Unmask, block: int | None, cache: Cache = "none",
              suffix: int = 256) -> MaskedDiffusion:
    """`cache`: Fast-dLLM's, for models that attend to the whole text; with it the blocks of a shifted model are
    `Anchored`."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    if cache != "none":
        if not isinstance(a.attention, Full):
            raise ValueError(f"cache: got {cache!r}, takes 'none' for {a.attention}, whose blocks have an exact cache")
        caching = DualCache(anchored=a.shift) if cache == "dual" else PrefixCache(anchored=a.shift, suffix=suffix)
        unmask = Anchored(unmask) if a.shift else unmask
    return MaskedDiffusion(a, windows, unmask=unmask, caching=caching, verify=verify)


@ALGORITHMS.register("freedave", FREEDAVE, "Wu and Zhang 2025",
                     "several steps of LLaDA in one forward, token for token the same output",
                     family=MASKED, needs=FILLING, guarantee="seed-exact")
def freedave(lm: Any, branches: int = 4, block: int | None = None, steps: int | None = None, cache: Cache = "none",
             suffix: int = 256) -> MaskedDiffusion:
    """`branches`: the authors' `draft_steps`. `steps`: of a block; None: one token a step, as published. `cache`:
    Fast-dLLM's, for models with full attention; the authors always use one. `suffix`: see `PrefixCache`. The authors'
    eager mode, which drafts into the next block, is not included."""
    return _verified(lm, BranchExact(branches), Quota(steps), block, cache, suffix)


@ALGORITHMS.register("freedave++", FREEDAVE, "Wu and Zhang 2025",
                     "several steps of threshold decoding in one forward; a draft may lack some of a step's tokens",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def freedave_plus(lm: Any, branches: int = 4, threshold: float | None = 0.9,
                  match: Literal["exact", "subset"] | None = None, block: int | None = None, cache: Cache = "none",
                  suffix: int = 256) -> MaskedDiffusion:
    """`threshold`: None: one token a step, which makes it FreeDave. `match`: see `BranchLater`; None: the authors'
    choice, "exact" for block-causal models and "subset" for those with full attention. `branches`, `cache` and `suffix`
    are as in `freedave`. With a cache and shifted logits the authors draft a block's first canvases token by token;
    here they are drafted by the threshold, as all others."""
    match = match or ("subset" if isinstance(Adapter.of(lm).attention, Full) else "exact")
    unmask: Unmask = Quota() if threshold is None else Threshold(threshold)
    return _verified(lm, BranchLater(branches, match), unmask, block, cache, suffix)
