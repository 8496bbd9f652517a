"""Published caches for models with attention in both directions, each with the sampler that it was published with."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import DualCache, PrefixCache
from decodax.algorithms.diffusion.caching.drift import Drift, Leading
from decodax.algorithms.diffusion.caching.features import Similarity
from decodax.algorithms.diffusion.caching.refreshes import DelayedTokens, DKVCacheGreedy, Frozen, Vicinity
from decodax.algorithms.diffusion.caching.reuse import FullStepOrder, Targets, Turns
from decodax.algorithms.diffusion.parallel.product import Agreed, GuidedDiffusion
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy, Noisy, Position, Random
from decodax.algorithms.diffusion.rules.stops import FirstEnd
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Factor, Quota, Threshold
from decodax.algorithms.diffusion.rules.windows import Blocks, Sliding, Whole
from decodax.algorithms.diffusion.systems.entries import (
    CACHE,
    DIFFUSION,
    FILLING,
)
from decodax.common.registry import ALGORITHMS


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


@ALGORITHMS.register("dinfer-vicinity", "dInfer: An Efficient Inference Framework for Diffusion Language Models",
                     "Ma et al. 2025",
                     "all sure positions at once, a dual cache that also recomputes what lies around the block",
                     family=CACHE, needs=FILLING, guarantee="approximate")
def dinfer_vicinity(lm: Any, block: int = 32, threshold: float = 0.9, before: int = 16, after: int = 16,
                    warmup: int = 0) -> MaskedDiffusion:
    """`before`, `after`: recomputed positions around the block. `warmup`: steps at the beginning that score the whole
    text. Where these end after the first block, the authors' code scores the whole text twice more, here once."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=Threshold(threshold, slack=1e-5),
                           caching=Vicinity(before=before, after=after, warmup=warmup))


@ALGORITHMS.register("dkv-cache", "dKV-Cache: The Cache for Diffusion Language Models", "Ma et al. 2025",
                     "LLaDA whose tokens enter the cache a step after they were decided", family=CACHE, needs=FILLING,
                     guarantee="approximate")
def dkv_cache(lm: Any, variant: Literal["decode", "greedy"] = "decode", block: int = 32, steps: int | None = None,
              refresh: int | None = None, window: int = 4, packed: tuple[int, ...] | None = None) -> MaskedDiffusion:
    """`steps`: of a block. `refresh`: steps from one wide forward to the next; None: 8, for "greedy" 2. `window`: open
    positions that "greedy" recomputes beside each one that it decides. `packed`: sizes of narrow forwards; None: 64 and
    128 for "decode", and for "greedy", whose order is random, what a step takes."""
    a, quota = Adapter.of(lm), Quota(steps)
    if variant == "greedy":
        most = (-(-block // steps) if steps else 1) * (2 + window + a.shift)
        greedy = DKVCacheGreedy(quota, window, refresh or 2, (most,) if packed is None else packed)
        return MaskedDiffusion(a, Blocks(block), Random(once=True), quota, caching=greedy)
    return MaskedDiffusion(a, Blocks(block), Confidence(), quota,
                           caching=DelayedTokens(1, refresh or 8, (64, 128) if packed is None else packed))


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


@ALGORITHMS.register("recap", "Plug-and-Play Context Feature Reuse for Efficient Masked Generation", "Liu et al. 2025",
                     "MaskGIT whose full steps choose targets, and whose local steps compute these alone", family=CACHE,
                     needs=FILLING, guarantee="approximate")
def recap(lm: Any, steps: int = 24, every: int = 2, lead: int = 0,
          order: Literal["random", "confidence"] = "confidence", choice_temperature: float = 5.5,
          schedule: Literal["power", "cosine"] = "power", size: int | None = None,
          packed: tuple[int, ...] = ()) -> MaskedDiffusion:
    """`every`: steps from one full step to the next, after the first `lead` full ones (the authors' `num_cache_iters`
    plus 1, and their `pre_full_iters`). `schedule`: of the quotas; "power" is the authors'. `order`: "confidence" has
    Gumbel noise of `choice_temperature`, which fades; "random" is MAR's. `packed`: see `Targets`."""
    turns, quota = Turns(every, lead), Quota(steps, schedule)
    score: Score = Random() if order == "random" else \
        Noisy(Confidence("policy"), choice_temperature, steps) if choice_temperature else Confidence("policy")
    return MaskedDiffusion(Adapter.of(lm), Whole(size), FullStepOrder(score, turns), quota,
                           caching=Targets(quota, score, turns, packed))


@ALGORITHMS.register("dllm-cache", "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching",
                     "Liu et al. 2025", "LLaDA that recomputes, layer by layer, the tokens whose values changed most",
                     family=CACHE, needs=FILLING, guarantee="approximate")
def dllm_cache(lm: Any, block: int = 32, steps: int | None = None, prompt: int = 50, response: int = 7,
               ratio: float = 0.25, size: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block. `prompt`, `response`: the intervals at which their entries are refreshed. `ratio`: the share
    of the response's tokens that are recomputed in between."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=Quota(steps),
                           caching=Similarity(prompt, response, ratio, size))


@ALGORITHMS.register("elastic-cache", "Attention Is All You Need for KV Cache in Diffusion LLMs",
                     "Nguyen-Tri, Ranjan, Shen 2025",
                     "all sure ones of the first masks; entries are recomputed where attention moved", family=CACHE,
                     needs=FILLING, guarantee="approximate")
def elastic_cache(lm: Any, window: int = 16, threshold: float = 0.9, gamma: float = 0.9,
                  size: int | None = None) -> MaskedDiffusion:
    """`window`: masked positions of a forward. `gamma`: the least similarity of attention to that of the forward
    before."""
    a = Adapter.of(lm)
    if a.mask is None or a.shift:
        raise ValueError(f"lm: got {a}, takes a model with a mask token whose logits speak of their own position")
    return MaskedDiffusion(a, Leading(size, window), unmask=Threshold(threshold), caching=Drift(a.mask, window, gamma),
                           stops=(FirstEnd(once=True),))
