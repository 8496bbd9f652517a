"""LocalLeap: unmasks confident positions, and less confident ones near them ("Accelerating Diffusion LLM Inference via
Local Determinism Propagation", Kong et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array, lax

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Memory, Unmask
from decodax.algorithms.diffusion.rules.unmasking import reaches
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Share
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class LocalLeap(Unmask):
    """Unmasks candidates with a probability of at least `anchor` (the anchors), and candidates within `radius`
    positions of an anchor with a probability of at least `relaxed`. Only open positions of the block are anchors, as in
    the authors' code."""

    anchor: float = 0.9
    relaxed: float = 0.75
    radius: int = 4

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError(f"radius: got {self.radius}, takes 0 or more")
        if not 0 < self.relaxed <= self.anchor:
            raise ValueError(f"relaxed: got {self.relaxed}, takes more than 0 up to the anchor of {self.anchor}")

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        anchors = view.active & reaches(seen, "model", "confidence", self.anchor)
        near = lax.reduce_window(anchors, False, lax.bitwise_or, (1, 2 * self.radius + 1), (1, 1), "SAME")
        return anchors | near & reaches(seen, "model", "confidence", self.relaxed)


@ALGORITHMS.register("localleap", "Accelerating Diffusion LLM Inference via Local Determinism Propagation",
                     "Kong et al. 2025", family="masked-diffusion", needs="a diffusion model")
def localleap(lm: Any, threshold: Share = 0.9, relaxed_threshold: Share = 0.75, radius: WholeNumber = 4,
              block_length: Count | None = None) -> MaskedDiffusion:
    """Unmasks confident positions, and less confident ones in their neighbourhood.

    The defaults are the authors' values for LLaDA.

    Args:
        threshold: minimum probability of a confident candidate, an anchor.
        relaxed_threshold: minimum probability of a candidate near an anchor.
        radius: maximum distance from an anchor, in positions.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    return MaskedDiffusion(adapter, windows, unmask=LocalLeap(threshold, relaxed_threshold, radius), caching=caching)
