"""d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation (Qian et al. 2026)."""

from __future__ import annotations

from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.parallel.pipeline import Delayed, InTurn, Pipeline, Pipelined, WithBest
from decodax.algorithms.diffusion.policies import Caching, Unmask
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.stops import FirstEnd
from decodax.algorithms.diffusion.rules.unmasking import Threshold
from decodax.common.registry import ALGORITHMS


def _pipeline(adapter: Adapter, block: int | None, add: float, full: float, most: int) -> Pipeline:
    windows, _ = blocks(adapter, block)
    return Pipeline(windows.block, windows.aligned, add, full, most)


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
