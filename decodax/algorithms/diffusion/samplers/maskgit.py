"""MaskGIT: fills the whole canvas in few steps with a cosine schedule ("MaskGIT: Masked Generative Image Transformer",
Chang et al., 2022)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Memory, Remask, Stepped
from decodax.algorithms.diffusion.rules.scores import Confidence, Noisy
from decodax.algorithms.diffusion.rules.unmasking import Quota, best, remaining
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, NonNegative
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class MaskBottom(Stepped, Remask):
    """MaskGIT as its loop is written, as the `remask` rule of a `MaskedDiffusion` whose `unmask` is `All()`: all
    candidates are unmasked, and the least confident ones of this step are masked again. The cosine schedule gives the
    number of positions that are masked afterwards; at least one candidate is kept.

    Attributes:
        steps: number of steps of a window.
        score: the confidence of candidates.
    """

    steps: int = 12
    score: Any = Confidence()

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        new = before.active & ~after.open
        keep = jnp.maximum(before.masked.sum(1, dtype=jnp.int32) - remaining(before, self.steps), 1)
        return after.replace(open=after.open | new & ~best(self.score(before, seen, memory), new, keep))


@ALGORITHMS.register("maskgit", "MaskGIT: Masked Generative Image Transformer", "Chang et al. 2022",
                     family="masked-diffusion", needs="a diffusion model")
def maskgit(lm: Any, steps: Count = 12, choice_temperature: NonNegative = 4.5,
            size: Count | None = None) -> MaskedDiffusion:
    """Fills the whole text at once, with cosine quotas, by confidence with Gumbel noise that fades.

    For very few steps. The loop of the paper draws all open positions and masks the least confident ones again
    (`MaskBottom`); unmasking only the others is equivalent.

    Args:
        steps: number of steps for the whole text.
        choice_temperature: scale of the noise in the first step; it falls linearly to 0.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    score = Noisy(Confidence("policy"), choice_temperature, steps)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), score, Quota(steps, "cosine"))
