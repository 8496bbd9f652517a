"""dParallel: Learnable Parallel Decoding for dLLMs (Chen et al. 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.unmasking import Threshold
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dparallel", "dParallel: Learnable Parallel Decoding for dLLMs", "Chen et al. 2025",
                     "all positions of low entropy at once, for models trained to be certain early", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def dparallel(lm: Any, entropy: float = 0.5, block: int | None = None) -> MaskedDiffusion:
    """Unmasks candidates with an entropy below `entropy`, in nats, as in the authors' loop for Dream; theirs for LLaDA
    also takes those equal to it."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, NegEntropy(), Threshold(entropy, "entropy", strict=True), caching=caching)
