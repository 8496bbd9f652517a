"""Published samplers that decide tokens step by step, by quotas, thresholds, noise schedules and exact block caches."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import AnchorCache, BlockCache, FusedCache, NoCache, SubBlockCache
from decodax.algorithms.diffusion.policies import Score, Unmask
from decodax.algorithms.diffusion.rules.remasking import Edit, ReMDM
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Noisy, Position, Random
from decodax.algorithms.diffusion.rules.unmasking import (
    Ancestral,
    Anchored,
    AtLeast,
    Coins,
    ConfidentPrefix,
    EntropyBound,
    Quota,
    Threshold,
)
from decodax.algorithms.diffusion.rules.windows import Sliding, SubBlocks, Whole
from decodax.algorithms.diffusion.systems.entries import (
    FILLING,
    MASKED,
    blocks,
)
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("llada", "Large Language Diffusion Models", "Nie et al. 2025",
                     "blocks from left to right, so many tokens a step, the surest or random ones", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def llada(lm: Any, block: int | None = None, steps: int | None = None,
          order: Literal["confidence", "random"] = "confidence") -> MaskedDiffusion:
    """`steps`: of a block; None: one for each position."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, Random() if order == "random" else Confidence(), Quota(steps), caching=caching)


@ALGORITHMS.register("dream", "Dream 7B: Diffusion Large Language Models", "Ye et al. 2025",
                     "the whole text at once, by entropy, margin or confidence under the policy, quotas along the "
                     "noise schedule", family=MASKED, needs=FILLING, guarantee="approximate")
def dream(lm: Any, steps: int = 64, order: Literal["entropy", "margin", "confidence", "random"] = "entropy",
          order_temperature: float = 0.0, size: int | None = None) -> MaskedDiffusion:
    """`order_temperature` is Dream's `alg_temp`; order "random" is its "origin". A step may decide nothing, as `Quota`
    says.

    Scores are those of the policy: `generate(top_p=..., temperature=0)` filters the distributions that they see, as in
    the authors' code. If top-k is given too, it is applied before top-p (in the authors' code after it).
    """
    scores: dict[str, Score] = {"entropy": NegEntropy("policy"), "margin": Margin("policy"), "random": Random(),
                                "confidence": Confidence("policy", log=False)}
    score = scores[order]
    if order_temperature:
        score = Noisy(score, order_temperature)
    unmask: Unmask = Ancestral(steps, eps=1e-3) if order == "random" else Quota(steps, "time")
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, unmask)


@ALGORITHMS.register("maskgit", "MaskGIT: Masked Generative Image Transformer", "Chang et al. 2022",
                     "the whole text at once, cosine quotas, confidence with Gumbel noise that fades", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def maskgit(lm: Any, steps: int = 12, choice_temperature: float = 4.5, size: int | None = None) -> MaskedDiffusion:
    """Drawing all open positions and masking the least sure ones again is the same as unmasking the others: see
    `MaskBottom`."""
    score = Noisy(Confidence("policy"), choice_temperature, steps)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, Quota(steps, "cosine"))


@ALGORITHMS.register("mdlm", "Simple and Effective Masked Diffusion Language Models", "Sahoo et al. 2024",
                     "ancestral sampling of the absorbing process: each position at a time of its own", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def mdlm(lm: Any, steps: int = 64, size: int | None = None) -> MaskedDiffusion:
    """Steps in which no position's time comes take no forward, as in the authors' cached sampler."""
    return MaskedDiffusion(Adapter.of(lm), Whole(size), Random(), Ancestral(steps))


@ALGORITHMS.register("bd3-lm", "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models",
                     "Arriola et al. 2025",
                     "diffusion inside blocks, one position a step at first-hitting times, exact block cache",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def bd3_lm(lm: Any, block: int | None = None, steps: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block; None: first-hitting times."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block, 16)
    return MaskedDiffusion(a, windows, Random(), Quota() if steps is None else Ancestral(steps), caching=caching)


@ALGORITHMS.register("remdm", "Remasking Discrete Diffusion Models with Inference-Time Scaling", "Wang et al. 2025",
                     "ancestral sampling that takes tokens back", family=MASKED, needs=FILLING, guarantee="approximate")
def remdm(lm: Any, steps: int = 64, eta: float = 0.02, kind: Literal["cap", "rescale", "conf", "loop"] = "cap",
          on: float = 0.55, off: float = 0.05, held: float = 0.9, size: int | None = None) -> MaskedDiffusion:
    """`on`, `off`, `held`: the times of the loop, and the share of decided positions in it. Each step takes a forward;
    the authors' code does not score an unchanged canvas again."""
    remask = ReMDM(steps, eta, kind, on, off, held)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), Random(), Coins(steps, remask), remask, stops=())


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


@ALGORITHMS.register("entropy-bounded",
                     "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
                     "Ben-Hamu et al. 2025", "as many positions as an entropy budget allows", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def entropy_bounded(lm: Any, bound: float = 0.1, block: int | None = None,
                    order: Literal["entropy", "confidence", "margin"] = "entropy") -> MaskedDiffusion:
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    scores: dict[str, Score] = {"entropy": NegEntropy(), "confidence": Confidence(), "margin": Margin()}
    return MaskedDiffusion(a, windows, scores[order], EntropyBound(bound), caching=caching)


@ALGORITHMS.register("sbd", "Set Block Decoding is a Language Model Inference Accelerator", "Gat et al. 2025",
                     "blocks of masks after a causal prefix, as many positions as an entropy budget allows, exact "
                     "cache; for models trained so, such as by `python scripts/train.py diffusion --attention "
                     "causal-prefix`", family=MASKED, needs=FILLING, guarantee="approximate")
def sbd(lm: Any, bound: float = 0.35, block: int | None = None) -> MaskedDiffusion:
    """`bound`: the paper's gamma, in nats; the paper has 0.1 and 0.35 for reasoning, 0.35 and 0.6 for chat. `block`:
    its k; the paper's models are trained with all block sizes from 2 to 16; default the model's. A block's entries are
    written by the first forward of the next one (the paper's algorithm 3). For models made from autoregressive ones
    whose masks attend to one another and predict their own positions. No shipped model is one. This trains one from
    `pycode` and writes it to `runs/pycode-sbd/model`:

        python scripts/train.py diffusion --preset pycode-diffusion --attention causal-prefix --block 16 \\
            --output runs/pycode-sbd
    """
    a = Adapter.of(lm)
    if not a.attention.causal or a.shift:
        raise ValueError(f"lm: got {a.attention}{' with shift' * a.shift}, takes causal-prefix attention without "
                         "shift, as scripts/train.py diffusion --attention causal-prefix trains it")
    windows, _ = blocks(a, block, lm.diffusion.block or 16)
    return MaskedDiffusion(a, windows, NegEntropy(), EntropyBound(bound), caching=FusedCache())


@ALGORITHMS.register("sdar", "SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation",
                     "Cheng et al. 2025",
                     "small blocks with an exact cache; static, dynamic, sequential or entropy-bounded quotas",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def sdar(lm: Any, rule: Literal["dynamic", "static", "sequential", "entropy", "random"] = "dynamic",
         threshold: float = 0.9, steps: int | None = None, bound: float = 0.1) -> MaskedDiffusion:
    """`steps`: of a block. `threshold`: of the dynamic rule, which falls back on the quota. `bound`: inclusive.

    Where fewer positions are open than the quota, the authors' static and dynamic rules also overwrite decided ones,
    including the prompt's; here such a step takes only the open ones.
    """
    a = Adapter.of(lm)
    windows, caching = blocks(a, None, 4)
    scores: dict[str, Score] = {"sequential": Position(), "random": Random(), "entropy": NegEntropy()}
    quota = Quota(steps, "width")
    rules: dict[str, Unmask] = {"dynamic": AtLeast(Threshold(threshold, strict=True), quota),
                                "entropy": EntropyBound(bound, inclusive=True)}
    return MaskedDiffusion(a, windows, scores.get(rule, Confidence()), rules.get(rule, quota), caching=caching)


@ALGORITHMS.register("sdlm", "Sequential Diffusion Language Models", "Liu et al. 2025",
                     "a few masks behind a causal prefix, the longest sure run of them", family="blockwise-parallel",
                     needs=FILLING, guarantee="approximate")
def sdlm(lm: Any, size: int | None = None, threshold: float = 0.9,
         measure: Literal["confidence", "entropy"] = "confidence") -> MaskedDiffusion:
    """`size`: positions predicted at once, from the last token and `size - 1` masks; default the model's block.
    `threshold`: tokens above this probability, or below this entropy in nats, where the authors' code takes `1 -
    entropy / log(vocabulary)`. The self-speculative mode is not included: each of its drafts has masks of its own
    behind it, beyond the region that drafts share."""
    a = Adapter.of(lm)
    size = size or lm.diffusion.block or 4
    return MaskedDiffusion(a, Sliding(size), Position(), ConfidentPrefix(threshold, measure, strict=True),
                           caching=FusedCache() if a.attention.causal else NoCache())


@ALGORITHMS.register("dparallel", "dParallel: Learnable Parallel Decoding for dLLMs", "Chen et al. 2025",
                     "all positions of low entropy at once, for models trained to be certain early", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def dparallel(lm: Any, entropy: float = 0.5, block: int | None = None) -> MaskedDiffusion:
    """Unmasks candidates with an entropy below `entropy`, in nats, as in the authors' loop for Dream; theirs for LLaDA
    also takes those equal to it."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, NegEntropy(), Threshold(entropy, "entropy", strict=True), caching=caching)


@ALGORITHMS.register("llada2", "LLaDA2.0: Scaling Up Diffusion Language Models to 100B", "Bie et al. 2025",
                     "sure positions or the step's quota, whichever is more, exact block cache", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def llada2(lm: Any, threshold: float = 0.95, steps: int | None = 32, block: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block. The quotas divide the whole block, even if it begins with tokens of the prompt."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    quota = Quota(None if steps is None else min(steps, windows.block), "width")
    return MaskedDiffusion(a, windows, unmask=AtLeast(Threshold(threshold, strict=True), quota), caching=caching)


@ALGORITHMS.register("llada2.1", "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", "Bie et al. 2026",
                     "LLaDA 2 that also overwrites decided tokens", family=MASKED, needs=FILLING,
                     guarantee="approximate")
def llada2_1(lm: Any, threshold: float = 0.7, edit: float = 0.5, most: int = 16,
             block: int | None = None) -> MaskedDiffusion:
    """`edit`: a token is replaced by another one above this probability. `most`: editing steps of a block without open
    positions, after which the end of the text is searched. A step in which nothing reaches the `threshold` unmasks one
    position."""
    return dataclasses.replace(llada2(lm, threshold, None, block), remask=Edit(edit, most))
