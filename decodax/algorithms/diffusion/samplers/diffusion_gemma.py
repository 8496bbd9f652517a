"""DiffusionGemma: a canvas of random tokens of which every position is decided again in each step, until it no longer
changes (Google DeepMind, 2026), as in transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Noise, noise
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Memory, Remask, Shaper, Stop
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.stops import EndOfText, Steps
from decodax.algorithms.diffusion.samplers.entropy_bounded import EntropyBound
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, NonNegative, Positive, Whole
from decodax.common.registry import ALGORITHMS
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.pallas_kernels.vocabulary import cooled


@dataclasses.dataclass(frozen=True)
class Anneal(Shaper):
    """Divides the logits by a temperature. It falls linearly from `first` in a window's first step, so that it would be
    `last` one step after the last of `steps` steps. The policy's temperature is applied in addition; in the published
    rule it is 1."""

    first: float = 0.8
    last: float = 0.4
    steps: int = 48

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.first:
            raise ValueError(f"last: got {self.last}, takes more than 0 up to the first of {self.first}")

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        left = jnp.maximum(1 - view.step.astype(jnp.float32) / self.steps, 0)
        return cooled(logits, (self.last + (self.first - self.last) * left)[:, None])


@dataclasses.dataclass(frozen=True)
class Renoise(Remask):
    """Uniform diffusion: positions that were not accepted in this step get a random token, and all positions are
    decided again in the next step, until a stop rule ends the window.

    Attributes:
        vocabulary: size of the vocabulary.
    """

    vocabulary: int
    noisy = True

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        # salt 0 is the first canvas's
        u = keys.uniforms(before.key, before.positions, Purpose.NOISE, salt=before.round + 1)
        fresh = noise(u, self.vocabulary)
        return after.replace(open=before.open, tokens=jnp.where(after.open & before.active, fresh, after.tokens))


@dataclasses.dataclass(frozen=True)
class Stable(Stop):
    """Early stop of a row's canvas in a step if the likeliest token of each open position is the same as in each of the
    `times` steps before, and the mean entropy of the model's distributions at these positions is below `entropy` nats.

    This is the rule of transformers; google-deepmind/gemma compares them with the tokens on the canvas, noise included.
    The memory is the likeliest tokens of the `times` steps before, `i32[B, times, W]`. The first `times` steps never
    stop.
    """

    entropy: float = 0.005
    times: int = 1
    likeliest = True

    def __post_init__(self) -> None:
        if self.times < 0:
            raise ValueError(f"times: got {self.times}, takes 0 or more")

    def init(self, view: View) -> Memory:
        return jnp.zeros((view.start.shape[0], self.times, view.positions.shape[1]), jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        assert seen.best is not None
        return jnp.concatenate([memory, seen.best[:, None]], 1)[:, 1:]

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        assert seen.best is not None
        same = ((seen.best[:, None] == memory) | ~view.masked[:, None]).all((1, 2))
        mean = jnp.where(view.masked, seen.model.entropy, 0).sum(1) / jnp.maximum(view.masked.sum(1), 1)
        return same & (mean < self.entropy) & (view.step >= self.times)


@ALGORITHMS.register("diffusion-gemma", "DiffusionGemma", "Google DeepMind 2026", family="masked-diffusion",
                     needs="a diffusion model")
def diffusion_gemma(lm: Any, entropy_bound: NonNegative = 0.1, steps: Count = 48, canvas_length: Count | None = None,
                    confidence_threshold: NonNegative = 0.005, temperatures: tuple[Positive, Positive] = (0.8, 0.4),
                    stability_threshold: Whole = 1) -> MaskedDiffusion:
    """Decides every position of a canvas of random tokens again in each step until the canvas no longer changes, with
    an exact block cache.

    Set the temperature of the call to 1, since the sampler has its own. A canvas that stops early, or has no step left,
    gets the likeliest tokens at all positions. The released models read their last prediction (self-conditioning),
    others only the tokens. A constraint holds for all candidates of a canvas together, so it holds for the text.

    Args:
        entropy_bound: entropy budget of a step, in nats.
        steps: maximum number of steps of a canvas.
        canvas_length: number of positions of a canvas. None: the model's block, or 256.
        confidence_threshold: mean entropy, in nats, below which a canvas that did not change is finished.
        temperatures: temperature of the first step, and of the step after the last one.
        stability_threshold: number of steps for which the likeliest tokens of a finished canvas did not change.
    """
    adapter = Adapter.of(lm, Noise(lm.vocab_size))
    windows, caching = blocks(adapter, canvas_length, lm.diffusion.block or 256)
    return MaskedDiffusion(adapter, windows, NegEntropy(), EntropyBound(entropy_bound), Renoise(lm.vocab_size), caching,
                           stops=(Stable(confidence_threshold, stability_threshold),
                                  Steps(steps, likeliest=True), EndOfText()),
                           shaper=Anneal(*temperatures, steps))
