"""DiffusionGemma (Google DeepMind 2026)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter, Noise
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED, blocks
from decodax.algorithms.diffusion.rules.remasking import Renoise
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.shapers import Anneal
from decodax.algorithms.diffusion.rules.stops import EndOfText, Stable, Steps
from decodax.algorithms.diffusion.rules.unmasking import EntropyBound
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("diffusion-gemma", "DiffusionGemma", "Google DeepMind 2026",
                     "a canvas of random tokens, decided anew in each step until it stands still; exact block cache",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def diffusion_gemma(lm: Any, bound: float = 0.1, steps: int = 48, canvas: int | None = None, entropy: float = 0.005,
                    temperatures: tuple[float, float] = (0.8, 0.4)) -> MaskedDiffusion:
    """The temperature falls over the `steps` of a canvas; set the policy's to 1. A canvas that stops (`Stable`) or has
    no step left gets this step's candidates, and no noise stays at unsure positions. transformers takes the likeliest
    tokens there, which are the same at temperature 0. Self-conditioning is not included; it needs a model that reads
    embeddings beside tokens."""
    a = Adapter.of(lm, Noise(lm.vocab_size))
    windows, caching = blocks(a, canvas, lm.diffusion.block or 256)
    return MaskedDiffusion(a, windows, NegEntropy(), EntropyBound(bound), Renoise(lm.vocab_size), caching,
                           stops=(Stable(entropy), Steps(steps), EndOfText()), shaper=Anneal(*temperatures, steps))
