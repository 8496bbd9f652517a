"""Dimple's confident decoding (Yu et al. 2025): all positions above a threshold, else as many as the noise schedule
says."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Counts, Memory, Seen, Unmask, View
from decodax.algorithms.diffusion.rules.unmasking import best, reaches


@dataclasses.dataclass(frozen=True)
class Confident(Counts, Unmask):
    """All positions whose candidate has a probability above `threshold`. If there are none, the schedule says how many
    positions are unmasked, the best by score: time runs from 1 to `eps` in even steps; the share of positions that are
    still open gives the current time, and the first later step of time that yields at least one position is taken. The
    last step unmasks all that is left.

    Attributes:
        threshold, eps: see above. steps: of a region; None: as many as it has open positions.
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
        """`i32[R]`: the number of positions that the schedule gives."""
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
