"""Entropy-bounded unmasking, and Set Block Decoding, which uses it ("Accelerated Sampling from Masked Diffusion Models
via Entropy Bounded Unmasking", Ben-Hamu et al., 2025; "Set Block Decoding is a Language Model Inference Accelerator",
Gat et al., 2025).

The number of positions that a step unmasks is limited by an entropy budget: the entropies bound the error of deciding
them at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache, blocks
from decodax.algorithms.diffusion.policies import Memory, Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Of
from decodax.algorithms.diffusion.stats import rank
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, NonNegative
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class EntropyBound(Unmask):
    """Unmasks the longest list by falling score whose entropies, without the largest of them, sum to at most `bound`;
    so at least one position is unmasked.

    Attributes:
        bound: entropy budget in nats.
        inclusive: whether the largest entropy counts, too (SDAR).
        of: "model" or "policy", see `Of`.
    """

    bound: float = 0.1
    inclusive: bool = False
    of: Of = "model"

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        order = rank(score, view.active)
        entropy = jnp.where(view.active, seen.of(self.of).entropy, 0)
        listed = jnp.put_along_axis(jnp.zeros_like(entropy), order, entropy, 1, inplace=False)
        spent = jnp.cumsum(listed, 1) - (0 if self.inclusive else lax.cummax(listed, axis=1))
        return view.active & jnp.take_along_axis(spent <= self.bound, order, 1)


@ALGORITHMS.register("entropy-bounded", "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded "
                     "Unmasking", "Ben-Hamu et al. 2025", family="masked-diffusion", needs="a diffusion model")
def entropy_bounded(lm: Any, gamma: NonNegative = 0.1, block_length: Count | None = None,
                    order: Literal["entropy", "confidence", "margin"] = "entropy") -> MaskedDiffusion:
    """Unmasks several positions at once, up to an entropy budget.

    Faster than one position per step at nearly the same quality; `gamma` trades one for the other.

    Args:
        gamma: entropy budget of a step, in nats.
        block_length: number of positions of a block. None: the model's, or 32.
        order: score by which positions are listed.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    scores: dict[str, Score] = {"entropy": NegEntropy(), "confidence": Confidence(), "margin": Margin()}
    return MaskedDiffusion(adapter, windows, scores[order], EntropyBound(gamma), caching=caching)


@ALGORITHMS.register("sbd", "Set Block Decoding is a Language Model Inference Accelerator", "Gat et al. 2025",
                     family="masked-diffusion", needs="a diffusion model", model="pycode-sbd")
def sbd(lm: Any, gamma: NonNegative = 0.35, block_size: Count | None = None) -> MaskedDiffusion:
    """Fills blocks of masks after a causal prefix, several positions at once, up to an entropy budget.

    For models made from autoregressive ones whose masks attend to one another and predict their own positions. The
    cache is exact: a block's entries are written by the first forward of the next one (the paper's algorithm 3).
    `pycode-sbd` is one; `scripts/train.py tune --objective sbd` makes others of autoregressive models.

    Args:
        gamma: entropy budget of a step, in nats; the paper has 0.1 and 0.35 for reasoning, 0.35 and 0.6 for chat.
        block_size: number of positions of a block, the paper's k; its models are trained with 2 to 16. None: the
            model's, or 16.
    """
    adapter = Adapter.of(lm)
    if not adapter.attention.causal or adapter.shift:
        raise ValueError(f"lm: got {adapter.attention}{' with shift' * adapter.shift}, takes causal-prefix attention "
                         "without shift, as scripts/train.py tune --objective sbd trains it")
    windows, _ = blocks(adapter, block_size, lm.diffusion.block or 16)
    return MaskedDiffusion(adapter, windows, NegEntropy(), EntropyBound(gamma), caching=FusedCache())
