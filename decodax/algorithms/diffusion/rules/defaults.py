"""The default policies, which change nothing: the model's own distributions, no remasking, one canvas in a forward
pass."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Memory, Remask, Shaper, Verify
from decodax.algorithms.diffusion.view import Seen, View


@dataclasses.dataclass(frozen=True)
class AsIs(Shaper):
    """Keeps the model's own distributions."""

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        return logits


@dataclasses.dataclass(frozen=True)
class Keep(Remask):
    """Keeps unmasked tokens: never remasks."""

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        return after


@dataclasses.dataclass(frozen=True)
class Sequential(Verify):
    """Scores one canvas of each row, and takes one step in a forward pass."""

    taken = ((),)

    def path(self, drafts: View, results: View) -> Array:
        return jnp.ones((drafts.start.shape[0], 1), bool)
