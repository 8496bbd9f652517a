"""dParallel: unmasks all positions of low entropy at once ("dParallel: Learnable Parallel Decoding for dLLMs", Chen et
al., 2025)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.unmasking import Threshold
from decodax.common.options import Count, NonNegative
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("dparallel", "dParallel: Learnable Parallel Decoding for dLLMs", "Chen et al. 2025",
                     family="masked-diffusion", needs="a diffusion model")
def dparallel(lm: Any, entropy: NonNegative = 0.5, block_length: Count | None = None) -> MaskedDiffusion:
    """Unmasks all positions of low entropy at once.

    For models trained to be certain early. A candidate whose entropy equals the bound is not unmasked, as in the
    authors' loop for Dream; in theirs for LLaDA it is.

    Args:
        entropy: entropy in nats below which a candidate is unmasked.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    return MaskedDiffusion(adapter, windows, NegEntropy(), Threshold(entropy, "entropy", strict=True), caching=caching)
