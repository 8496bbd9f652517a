"""Published caches for models that see the text in both directions, each with the sampler it was published with."""

from __future__ import annotations

from typing import Any, Literal

from decodax.diffusion.adapter import Adapter
from decodax.diffusion.algorithm import MaskedDiffusion
from decodax.diffusion.caching import Dual, Prefix
from decodax.diffusion.commits import Anchored, Factor, Quota, Threshold
from decodax.diffusion.drift import Drift, Leading
from decodax.diffusion.entries import CACHE, entry
from decodax.diffusion.features import Similarity
from decodax.diffusion.policies import Caching, Commit, Score
from decodax.diffusion.product import Agreed, Guided
from decodax.diffusion.refreshes import DelayedTokens, Frozen, Greedy, Vicinity
from decodax.diffusion.scores import Confidence, Noisy, Position, Random
from decodax.diffusion.stops import FirstEnd
from decodax.diffusion.windows import Fixed, Sliding, Whole


@entry("fast-dllm", "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding",
       "Wu et al. 2025", "all sure positions at once, approximate prefix or dual cache refreshed at each block", CACHE)
def fast_dllm(lm: Any, block: int = 32, threshold: float = 0.9, factor: float | None = None,
              cache: Literal["dual", "prefix", "none"] = "dual", suffix: int = 256) -> MaskedDiffusion:
    """`factor` in the threshold's place takes the paper's factor rule. `suffix`: see `Prefix`. With a cache, a model
    whose logits point to the next position decides as the authors' code for Dream does: see `Anchored`."""
    a = Adapter.of(lm)
    commit: Commit = Threshold(threshold) if factor is None else Factor(factor)
    if cache == "none":
        return MaskedDiffusion(a, Fixed(block), commit=commit)
    caching: Caching = Dual(anchored=a.shift) if cache == "dual" else Prefix(anchored=a.shift, suffix=suffix)
    return MaskedDiffusion(a, Fixed(block), commit=Anchored(commit) if a.shift else commit, caching=caching)


@entry("dinfer-vicinity", "dInfer: An Efficient Inference Framework for Diffusion Language Models", "Ma et al. 2025",
       "all sure positions at once, a dual cache that also recomputes what lies around the block", CACHE)
def dinfer_vicinity(lm: Any, block: int = 32, threshold: float = 0.9, before: int = 16, after: int = 16,
                    warmup: int = 0) -> MaskedDiffusion:
    """`before`, `after`: positions around the block. `warmup`: text-wide steps at the beginning."""
    return MaskedDiffusion(Adapter.of(lm), Fixed(block), commit=Threshold(threshold),
                           caching=Vicinity(before=before, after=after, warmup=warmup))


@entry("dkv-cache", "dKV-Cache: The Cache for Diffusion Language Models", "Ma et al. 2025",
       "LLaDA whose tokens enter the cache a step after they were decided", CACHE)
def dkv_cache(lm: Any, variant: Literal["decode", "greedy"] = "decode", block: int = 32, steps: int | None = None,
              refresh: int | None = None, window: int = 4, packed: tuple[int, ...] | None = None) -> MaskedDiffusion:
    """`steps` of a block. `refresh`: steps from one text-wide forward to the next; None: 8, greedy 2. `window`: open
    positions that greedy recomputes beside each it decides. `packed`: sizes of narrow forwards; None: 64 and 128 for
    "decode", what a step takes for "greedy", whose order is random."""
    a, quota = Adapter.of(lm), Quota(steps)
    if variant == "greedy":
        most = (-(-block // steps) if steps else 1) * (2 + window + a.shift)
        greedy = Greedy(quota, window, refresh or 2, (most,) if packed is None else packed)
        return MaskedDiffusion(a, Fixed(block), Random(once=True), quota, caching=greedy)
    return MaskedDiffusion(a, Fixed(block), Confidence(), quota,
                           caching=DelayedTokens(1, refresh or 8, (64, 128) if packed is None else packed))


FLASHDLM = "Accelerating Diffusion Language Model Inference via Efficient KV Caching and Guided Diffusion"


@entry("freecache", FLASHDLM, "Hu et al. 2025",
       "LLaDA with a cache that is never refreshed: blocks freeze as they are done", CACHE)
def freecache(lm: Any, block: int = 32, steps: int | None = None, suffix: int = 256) -> MaskedDiffusion:
    """FlashDLM's cache alone. `steps` of a block. `suffix`: positions recomputed, from the block's beginning on."""
    return MaskedDiffusion(Adapter.of(lm), Fixed(block), commit=Quota(steps), caching=Frozen(suffix))


@entry("flashdlm", FLASHDLM, "Hu et al. 2025",
       "from left to right, what a small autoregressive model would have said too, with FreeCache", CACHE, draft=True)
def flashdlm(lm: Any, draft: Any, top: int = 1, lookahead: int = 32, before: int = 128,
             suffix: int = 128) -> MaskedDiffusion:
    """Guided diffusion. `top`: how far down the autoregressive model's list a token may stand. `lookahead`: masked
    positions judged at once. `before`, `suffix`: positions recomputed before and from the first masked one, the
    authors' sliding window."""
    return MaskedDiffusion(Adapter.of(lm), Sliding(lookahead), Position(), Agreed(go_on=False),
                           caching=Frozen(suffix, before), verify=Guided(draft, top))


@entry("recap", "Plug-and-Play Context Feature Reuse for Efficient Masked Generation", "Liu et al. 2025",
       "MaskGIT that recomputes only open positions, but for every few steps", CACHE)
def recap(lm: Any, steps: int = 24, every: int = 2, order: Literal["random", "confidence"] = "random",
          choice_temperature: float = 4.5, size: int | None = None, packed: tuple[int, ...] = ()) -> MaskedDiffusion:
    """`every`: steps from one full forward to the next, in between what was open in it is recomputed."""
    score: Score = Random() if order == "random" else Noisy(Confidence("policy"), choice_temperature, steps)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, Quota(steps, "cosine"),
                           caching=DelayedTokens(None, every, packed))


@entry("dllm-cache", "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching",
       "Liu et al. 2025", "LLaDA that recomputes, layer by layer, the tokens whose values changed most", CACHE)
def dllm_cache(lm: Any, block: int = 32, steps: int | None = None, prompt: int = 50, response: int = 7,
               ratio: float = 0.25, size: int | None = None) -> MaskedDiffusion:
    """`steps` of a block. `prompt`, `response`: intervals of their refreshes; `ratio` of the response's tokens in
    between."""
    return MaskedDiffusion(Adapter.of(lm), Fixed(block), commit=Quota(steps),
                           caching=Similarity(prompt, response, ratio, size))


@entry("elastic-cache", "Attention Is All You Need for KV Cache in Diffusion LLMs",
       "Nguyen-Tri, Ranjan, Shen 2025",
       "all sure ones of the first masks; entries are recomputed where attention moved", CACHE)
def elastic_cache(lm: Any, window: int = 16, threshold: float = 0.9, gamma: float = 0.9,
                  size: int | None = None) -> MaskedDiffusion:
    """`window`: the masked positions of a forward. `gamma`: the least likeness of attention to that of the forward
    before."""
    a = Adapter.of(lm)
    if a.mask is None or a.shift:
        raise ValueError(f"lm: got {a}, takes a model with a mask token whose logits speak of their own position")
    return MaskedDiffusion(a, Leading(size, window), commit=Threshold(threshold), caching=Drift(a.mask, window, gamma),
                           stops=(FirstEnd(),))
