"""Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models (Arriola et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.scores import Random
from decodax.algorithms.diffusion.rules.unmasking import Ancestral, Quota
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("bd3-lm", "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models",
                     "Arriola et al. 2025",
                     "diffusion inside blocks, one position a step at first-hitting times, exact block cache",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def bd3_lm(lm: Any, block: int | None = None, steps: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block; None: first-hitting times."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block, 16)
    return MaskedDiffusion(a, windows, Random(), Quota() if steps is None else Ancestral(steps), caching=caching)
