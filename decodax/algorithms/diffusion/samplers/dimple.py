"""Dimple: confident decoding of the whole text ("Dimple: Discrete Diffusion Multimodal Large Language Model with
Parallel Decoding", Yu et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.policies import Memory, Score, Stepped, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Random
from decodax.algorithms.diffusion.rules.unmasking import best, reaches
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.samplers.fast_dllm import PrefixCache
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Confident(Stepped, Unmask):
    """Unmasks all positions whose candidate has a probability above `threshold`. If there are none, unmasks the
    positions with the best scores; their number is given by the noise schedule.

    Time runs from 1 to `eps` in even steps. The share of positions that are still open is the current time; the first
    later time step that yields at least one position is taken. The last step unmasks all open positions.

    Attributes:
        threshold: probability above which a candidate is unmasked.
        steps: number of steps of a window; None: the number of its initially open positions.
        eps: time at the end of the last step.
    """

    threshold: float = 0.95
    steps: int | None = None
    eps: float = 1e-3

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")

    def _steps(self, view: View) -> Array:
        return jnp.maximum(view.opened, 1) if self.steps is None else jnp.full_like(view.opened, self.steps)

    def count(self, view: View) -> Array:
        """Returns the number of positions that the noise schedule unmasks in this step, `i32[R]`; it is used where no
        candidate is above the threshold."""
        steps, left = self._steps(view)[:, None], view.masked.sum(1, dtype=jnp.int32)[:, None]
        step = jnp.arange(max(self.steps or 0, view.positions.shape[1]) + 1, dtype=jnp.int32)
        time = 1 - (1 - self.eps) * step.astype(jnp.float32) / steps                        # s
        share = left.astype(jnp.float32) / jnp.maximum(view.opened, 1)[:, None]             # t
        gives = jnp.where(step < steps, (left * (1 - time / share)).astype(jnp.int32), left)
        found = (time < share) & (step > view.step[:, None]) & (step <= steps) & (gives >= 1)
        first = jnp.argmax(found, 1)[:, None]
        return jnp.where(found.any(1), jnp.take_along_axis(gives, first, 1)[:, 0], left[:, 0])

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        sure = view.active & reaches(seen, "model", "confidence", self.threshold, strict=True)
        scheduled = best(score, view.active, self.count(view))
        chosen = jnp.where(sure.any(1, keepdims=True), sure, scheduled)
        return jnp.where((view.step + 1 >= self._steps(view))[:, None], view.active, chosen)


@ALGORITHMS.register("dimple", "Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding",
                     "Yu et al. 2025", family="masked-diffusion", needs="a diffusion model")
def dimple(lm: Any, threshold: Share = 0.95, steps: Count | None = None,
           order: Literal["random", "confidence", "margin", "entropy"] = "random", size: Count | None = None,
           prefill: bool = True) -> MaskedDiffusion:
    """Unmasks all confident positions of the whole text; if there are none, a number given by the noise schedule.

    Structure priors are given tokens in the canvas: `decodax.infill`.

    Args:
        threshold: probability above which a candidate is unmasked, in any order.
        steps: number of steps for the whole text. None: the number of new tokens.
        order: score by which a step unmasks positions if none is above the threshold; "random" is the authors'
            "origin", "confidence" their "maskgit_plus".
        size: maximum number of new tokens of a text. None: the budget of the call.
        prefill: whether the prompt's entries, except its last token's, are computed in the first forward pass only.
    """
    scores: dict[str, Score] = {"random": Random(), "confidence": Confidence(), "margin": Margin(),
                                "entropy": NegEntropy()}
    return MaskedDiffusion(Adapter.of(lm), Whole(size), scores[order], Confident(threshold, steps),
                           caching=PrefixCache(suffix=1) if prefill else NoCache())
