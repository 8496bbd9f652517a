"""Scores, which determine the order of unmasking: by confidence, margin or entropy, at random, or from left to right;
each with optional Gumbel noise."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Memory, Score
from decodax.algorithms.diffusion.view import Seen, View
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.sampling.draw import exponentials

Of = Literal["model", "policy"]
"""The distribution: the model's own, or the policy's (temperature, top-p, ...), in which a greedy row has temperature
1."""


@dataclasses.dataclass(frozen=True)
class Confidence(Score):
    """Scores a candidate by its log-probability ("low-confidence remasking", LLaDA), or by its probability with
    `log=False`."""

    of: Of = "model"
    log: bool = True

    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        stats = seen.of(self.of)
        return stats.log_prob if self.log else stats.prob


@dataclasses.dataclass(frozen=True)
class Margin(Score):
    """Scores a position by the largest probability of a token there minus the second largest (Dream's
    "topk_margin")."""

    of: Of = "model"

    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        return seen.of(self.of).margin


@dataclasses.dataclass(frozen=True)
class NegEntropy(Score):
    """Scores a position by minus the entropy of its distribution, in nats, so that certain positions come first
    (Dream's "entropy")."""

    of: Of = "model"

    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        return -seen.of(self.of).entropy


@dataclasses.dataclass(frozen=True)
class Random(Score):
    """Scores a position by a uniform random number, so that positions are unmasked in random order. `once=False`: it is
    drawn again in each step; True: once for the whole text."""

    once: bool = False

    def __call__(self, view: View, seen: Seen | None, memory: Memory) -> Array:
        draws = keys.uniforms(view.key, view.positions, Purpose.ORDER) if self.once else view.uniforms(Purpose.ORDER)
        return draws[..., 0]


@dataclasses.dataclass(frozen=True)
class Position(Score):
    """Scores a position by minus its index, so that positions are unmasked from left to right."""

    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        return -view.positions.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Noisy(Score):
    """Adds `temperature` times Gumbel noise to a score.

    The `n` best positions are then `n` draws without replacement from softmax(score / temperature): Dream's `alg_temp`.
    With `steps`, the temperature falls linearly to 0 over that number of steps: MaskGIT's choice temperature.
    """

    score: Any
    temperature: float
    steps: int | None = None

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        time = exponentials(view.addresses(Purpose.ORDER), 1)[..., 0]
        left = 1.0 if self.steps is None else jnp.maximum(1 - (view.step + 1) / self.steps, 0)[:, None]
        return self.score(view, seen, memory) - self.temperature * left * jnp.log(time)
