"""Accelerating Diffusion LLM Inference via Local Determinism Propagation (Kong et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.unmasking import LocalLeap
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("localleap", "Accelerating Diffusion LLM Inference via Local Determinism Propagation",
                     "Kong et al. 2025", "sure positions, and less sure ones in their neighbourhood", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def localleap(lm: Any, anchor: float = 0.9, relaxed: float = 0.75, radius: int = 4,
              block: int | None = None) -> MaskedDiffusion:
    """The defaults are the authors' values for LLaDA."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, unmask=LocalLeap(anchor, relaxed, radius), caching=caching)
