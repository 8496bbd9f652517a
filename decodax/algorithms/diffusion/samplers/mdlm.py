"""MDLM and BD3-LM: ancestral sampling of the absorbing process, over the whole text or inside blocks ("Simple and
Effective Masked Diffusion Language Models", Sahoo et al., 2024; "Block Diffusion: Interpolating Between Autoregressive
and Diffusion Language Models", Arriola et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Memory, Stepped, Unmask
from decodax.algorithms.diffusion.rules.scores import Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.keys import Purpose, uniforms


@dataclasses.dataclass(frozen=True)
class Ancestral(Stepped, Unmask):
    """Unmasks each position at its own random time, over `steps` even steps of time from 1 to `eps` (MDLM; Dream's
    "origin"). The last step unmasks all positions that are left.

    In the step from t to s, a position is unmasked with probability `1 - s/t`, independently of all others; its time is
    therefore uniform. So the times of all positions are drawn at once. Steps in which no position is unmasked would not
    change the canvas (MDLM's cached sampler skips their forward passes), so they are left out. With infinitely many
    steps this is first-hitting sampling: one position at a time, in random order (`Quota` by `Random`).
    """

    steps: int = 64
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        passed = uniforms(view.key, view.positions, Purpose.ACCEPT)[..., 0] / (1 - self.eps)
        falls = jnp.minimum((passed * self.steps).astype(jnp.int32), self.steps - 1)
        return view.active & (falls == jnp.where(view.active, falls, self.steps).min(1, keepdims=True))


@ALGORITHMS.register("mdlm", "Simple and Effective Masked Diffusion Language Models", "Sahoo et al. 2024",
                     family="masked-diffusion", needs="a diffusion model")
def mdlm(lm: Any, steps: Count = 64, size: Count | None = None) -> MaskedDiffusion:
    """Samples the absorbing process: each position is unmasked at its own random time.

    Steps in which no position is unmasked take no forward pass, as in the authors' cached sampler.

    Args:
        steps: number of steps for the whole text.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    return MaskedDiffusion(Adapter.of(lm), Whole(size), Random(), Ancestral(steps))


@ALGORITHMS.register("bd3-lm", "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models",
                     "Arriola et al. 2025", family="masked-diffusion", needs="a diffusion model")
def bd3_lm(lm: Any, block_size: Count | None = None, steps: Count | None = None) -> MaskedDiffusion:
    """Samples the absorbing process inside blocks from left to right, with an exact block cache.

    For block-causal models.

    Args:
        block_size: number of positions of a block. None: the model's, or 16.
        steps: number of steps of a block. None: first-hitting times, one position per step.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_size, 16)
    unmask = Quota() if steps is None else Ancestral(steps)
    return MaskedDiffusion(adapter, windows, Random(), unmask, caching=caching)
