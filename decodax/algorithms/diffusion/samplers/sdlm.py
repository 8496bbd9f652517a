"""SDLM: predicts a few masks after a causal prefix, and keeps the longest confident run of them ("Sequential Diffusion
Language Models", Liu et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache, NoCache
from decodax.algorithms.diffusion.policies import Memory, Unmask
from decodax.algorithms.diffusion.rules.scores import Of, Position
from decodax.algorithms.diffusion.rules.unmasking import Measure, reaches
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class ConfidentPrefix(Unmask):
    """Unmasks the candidates before the first one that is not confident enough. With `Position` as the score, the first
    open position is always unmasked.

    Attributes:
        value, measure, of, strict: the threshold and its measure, see `reaches`.
    """

    value: float = 0.9
    measure: Measure = "confidence"
    of: Of = "model"
    strict: bool = False

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        sure = reaches(seen, self.of, self.measure, self.value, self.strict) | ~view.active
        return jnp.cumprod(sure, 1).astype(bool)


@ALGORITHMS.register("sdlm", "Sequential Diffusion Language Models", "Liu et al. 2025", family="blockwise-parallel",
                     needs="a diffusion model")
def sdlm(lm: Any, size: Count | None = None, threshold: float = 0.9,
         measure: Literal["confidence", "entropy"] = "confidence") -> MaskedDiffusion:
    """Predicts a few masks after a causal prefix and keeps the longest confident run of them.

    For models with causal-prefix attention. The self-speculative mode is not included: each of its drafts is followed
    by masks of its own, outside of the window that drafts share.

    Args:
        size: number of positions predicted at once, from the last token and `size - 1` masks. None: the model's block,
            or 4.
        threshold: tokens are kept with a probability above this, or with an entropy below this in nats, where the
            authors' code takes `1 - entropy / log(vocabulary)`.
        measure: "confidence" (probability) or "entropy".
    """
    adapter = Adapter.of(lm)
    size = size or lm.diffusion.block or 4
    return MaskedDiffusion(adapter, Sliding(size), Position(), ConfidentPrefix(threshold, measure, strict=True),
                           caching=FusedCache() if adapter.attention.causal else NoCache())
