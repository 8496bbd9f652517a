"""Self Speculative Decoding for Diffusion Large Language Models (Gao et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter, Full
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import DualCache, PrefixCache
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.parallel.branches import BranchTree
from decodax.algorithms.diffusion.policies import Unmask, Verify
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Quota
from decodax.common.registry import ALGORITHMS

Cache = Literal["none", "prefix", "dual"]


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


@ALGORITHMS.register("ssd", "Self Speculative Decoding for Diffusion Large Language Models", "Gao et al. 2025",
                     "a tree of LLaDA's surest candidates in several orders in one forward, token for token the same "
                     "output", family=MASKED, needs=FILLING, guarantee="seed-exact")
def ssd(lm: Any, length: int = 3, top: int = 2, most: int = 16, block: int | None = None) -> MaskedDiffusion:
    """`top`: 1 drafts a chain."""
    return _verified(lm, BranchTree(length, top, most), Quota(), block)
