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
    """The default shaper: returns the model's logits unchanged."""

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        return logits


@dataclasses.dataclass(frozen=True)
class Keep(Remask):
    """The default remasking rule: never masks a decided token again."""

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        return after


@dataclasses.dataclass(frozen=True)
class Sequential(Verify):
    """The default verifier, without drafts: each forward pass scores one canvas of each row and takes one denoising
    step."""

    taken = ((),)

    def path(self, drafts: View, results: View) -> Array:
        return jnp.ones((drafts.start.shape[0], 1), bool)
