"""Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing (Wang et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter, Full, PromptBlocks
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache, NoCache
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.parallel.pipeline import Pipeline, Pipelined
from decodax.algorithms.diffusion.rules.unmasking import Threshold
from decodax.common.registry import ALGORITHMS


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
