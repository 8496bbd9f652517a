"""Fast-dLLM v2: Efficient Block-Diffusion LLM (Wu et al. 2025)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import AnchorCache, BlockCache, DualCache, PrefixCache, SubBlockCache
from decodax.algorithms.diffusion.defaults import CACHE, FILLING, MASKED, blocks
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Factor, Quota, Threshold
from decodax.algorithms.diffusion.rules.windows import Blocks, SubBlocks
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("fast-dllm-2", "Fast-dLLM v2: Efficient Block-Diffusion LLM", "Wu et al. 2025",
                     "sub-blocks of blocks, all sure positions at once, exact block cache", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def fast_dllm_2(lm: Any, sub: int = 8, threshold: float = 0.9,
                cache: Literal["block", "dual"] = "block") -> MaskedDiffusion:
    """`cache`: exact for finished blocks; "dual" also inside a block (the authors' `use_block_cache`), which is
    approximate. Where logits point to the next position, as in the authors' models, a block's first token is the
    likeliest one of the forward that finishes the block before it."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, None)
    unmask: Unmask = Threshold(threshold, strict=True)
    exact = isinstance(caching, BlockCache) and not a.attention.causal
    if cache == "dual" and not exact:
        raise ValueError("cache: got 'dual', takes 'block'; the cache inside a block is for block-causal models")
    if exact:
        caching = SubBlockCache(sub=min(sub, windows.block)) if cache == "dual" else AnchorCache()
        unmask = Anchored(unmask) if a.shift else unmask
    return MaskedDiffusion(a, SubBlocks(windows.block, windows.aligned, min(sub, windows.block)), unmask=unmask,
                           caching=caching)


@ALGORITHMS.register("fast-dllm", "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and "
                     "Parallel Decoding", "Wu et al. 2025",
                     "all sure positions at once, approximate prefix or dual cache refreshed at each block",
                     family=CACHE, needs=FILLING, guarantee="approximate")
def fast_dllm(lm: Any, block: int = 32, threshold: float | None = 0.9, steps: int | None = None,
              factor: float | None = None, variant: Literal["a", "b", "c"] = "a",
              cache: Literal["dual", "prefix", "none"] = "dual", suffix: int = 256) -> MaskedDiffusion:
    """`factor` replaces the threshold by the factor rule, of which three variants exist (see `Factor`). The default,
    "a", is the paper's. The authors' code ("b") also takes the last open position when it alone fails, which the
    paper's bound does not cover. "c" is looser. `threshold` None without a factor: quotas of `steps` a block, so that
    only the cache is Fast-dLLM's. `suffix`: see `PrefixCache`.

    With a cache, a model whose logits point to the next position decides as in the authors' code for Dream: see
    `Anchored`. Its quotas go by entropy along the noise schedule, as Dream's.
    """
    a = Adapter.of(lm)
    anchored = a.shift and cache != "none"
    score: Score = Confidence()
    unmask: Unmask
    if factor is not None:
        unmask = Factor(factor, variant)
    elif threshold is not None:
        unmask = Threshold(threshold)
    elif anchored:
        score, unmask = NegEntropy("policy"), Quota(block if steps is None else steps, "time")
    else:
        unmask = Quota(steps)
    if cache == "none":
        return MaskedDiffusion(a, Blocks(block), score, unmask)
    caching = DualCache(anchored=anchored) if cache == "dual" else PrefixCache(anchored=anchored, suffix=suffix)
    return MaskedDiffusion(a, Blocks(block), score, Anchored(unmask) if anchored else unmask, caching=caching)
