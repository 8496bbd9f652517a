"""Published samplers that take several steps or several blocks in one forward: lossless verification, pipelines of
blocks, and a second model that decides how many tokens are kept."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter, BlockCausal, Full, PromptBlocks
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import DualCache, FusedCache, NoCache, PrefixCache
from decodax.algorithms.diffusion.parallel.branches import BranchExact, BranchLater, BranchTree
from decodax.algorithms.diffusion.parallel.pipeline import Delayed, InTurn, Pipeline, Pipelined, WithBest
from decodax.algorithms.diffusion.parallel.product import Agreed, LimitedLookahead, Product, Trailing
from decodax.algorithms.diffusion.policies import Caching, Unmask, Verify
from decodax.algorithms.diffusion.rules.scores import NegEntropy, Position
from decodax.algorithms.diffusion.rules.stops import EndOfText, FirstEnd
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Quota, Threshold
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.algorithms.diffusion.systems.entries import (
    DIFFUSION,
    FILLING,
    MASKED,
    blocks,
)
from decodax.common.registry import ALGORITHMS

FREEDAVE = "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models"


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


@ALGORITHMS.register("ssd", "Self Speculative Decoding for Diffusion Large Language Models", "Gao et al. 2025",
                     "a tree of LLaDA's surest candidates in several orders in one forward, token for token the same "
                     "output", family=MASKED, needs=FILLING, guarantee="seed-exact")
def ssd(lm: Any, length: int = 3, top: int = 2, most: int = 16, block: int | None = None) -> MaskedDiffusion:
    """`top`: 1 drafts a chain."""
    return _verified(lm, BranchTree(length, top, most), Quota(), block)


def _pipeline(adapter: Adapter, block: int | None, add: float, full: float, most: int) -> Pipeline:
    windows, _ = blocks(adapter, block)
    return Pipeline(windows.block, windows.aligned, add, full, most)


@ALGORITHMS.register("d2f", "Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing",
                     "Wang et al. 2025", "a pipeline of blocks, the later ones half blind, exact block cache",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def d2f(lm: Any, threshold: float = 0.9, add: float = 0.1, full: float = 0.95, most: int = 8,
        block: int | None = None) -> MaskedDiffusion:
    """`most`: blocks at once; the authors set no bound. Their models are LLaDA and Dream, fine-tuned so that a position
    attends only to blocks up to its own, with the prompt as one block. Therefore a model whose checkpoint has full
    attention is run with that pattern. A block-causal model keeps its own blocks."""
    a = Adapter.of(lm)
    windows = _pipeline(a, block, add, full, most)
    if isinstance(a.attention, Full):
        a = dataclasses.replace(a, attention=PromptBlocks(windows.block))
    return MaskedDiffusion(a, windows, unmask=Pipelined(Threshold(threshold, strict=True), windows),
                           caching=NoCache() if a.attention.causal else FusedCache())


@ALGORITHMS.register("d3llm", "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation",
                     "Qian et al. 2026", "a pipeline of blocks by entropy, cached with a delay when they have settled",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def d3llm(lm: Any, entropy: float = 0.5, add: float = 0.1, full: float = 0.95, most: int = 8, delay: int | None = 1,
          refresh: int | None = None, suffix: int = 256, kind: Literal["llada", "dream"] | None = None,
          block: int | None = None) -> MaskedDiffusion:
    """`delay`: None: no cache. `most`: blocks at once; the authors set no bound. `suffix`: see `Delayed`. `kind`: which
    of the authors' two loops; None: by whether the model's logits point to the next position. The loop for LLaDA always
    unmasks the position of lowest entropy, and starts the delay of a block when the one before it is cached. The loop
    for Dream, with a cache, predicts the first position that it recomputes from that position's own logits; here it is
    predicted from the position before it, as everywhere."""
    a = Adapter.of(lm)
    windows = _pipeline(a, block, add, full, most)
    sure: Unmask = Threshold(entropy, "entropy")
    caching: Caching = NoCache() if delay is None else Delayed(delay, refresh, suffix)
    if kind == "llada" or (kind is None and not a.shift):
        sure = WithBest(sure)
        caching = caching if delay is None else InTurn(delay, refresh, suffix, block=windows.block)
    return MaskedDiffusion(a, windows, NegEntropy(), Pipelined(sure, windows, "first"), caching=caching,
                           stops=(FirstEnd(filled=True),))


@ALGORITHMS.register("apd", "Accelerating Diffusion LLMs via Adaptive Parallel Decoding",
                     "Israel, Van den Broeck, Grover 2025",
                     "left to right, as many tokens as a small autoregressive model goes along with", family=MASKED,
                     needs=DIFFUSION, guarantee="approximate")
def apd(lm: Any, draft: Any, weight: float = 0.7, lookahead: int = 32, window: int | None = 16) -> MaskedDiffusion:
    """`weight`: of the diffusion model in the product, the authors' R. `lookahead`: masked positions that are scored, M
    (theirs: 100 and more). `window`: positions recomputed before them, W (None: all). The two models share a
    vocabulary. No shipped model sees the whole text and has such a draft; this makes one of `pycode` and
    writes it to `runs/pycode-full/model`:

        python scripts/train.py diffusion --preset pycode-diffusion --block 0 --output runs/pycode-full
    """
    a = Adapter.of(lm)
    if a.attention.causal or isinstance(a.attention, BlockCausal):
        raise ValueError(f"lm: got {a.attention}, takes a model that sees the whole text")
    return MaskedDiffusion(dataclasses.replace(a, attention=LimitedLookahead()), Sliding(lookahead), Position(),
                           Agreed(), caching=NoCache() if window is None else Trailing(window),
                           verify=Product(draft, weight), stops=(EndOfText(),))
