"""FlashDLM: a cache that is never refreshed, and an autoregressive model that determines how many tokens are kept
("Accelerating Diffusion Language Model Inference via Efficient KV Caching and Guided Diffusion", Hu et al., 2025).

FreeCache freezes the entries of finished blocks. Guided diffusion unmasks, from left to right, the tokens that a second
model finds likely, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.rewriting import Rewriting
from decodax.algorithms.diffusion.policies import Memory
from decodax.algorithms.diffusion.rules.judged import Agreed, Judged
from decodax.algorithms.diffusion.rules.scores import Position
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Blocks, Sliding
from decodax.algorithms.diffusion.view import View, span
from decodax.common.options import Count, Range, Share
from decodax.common.registry import ALGORITHMS
from decodax.core.composed import data

PAPER = "Accelerating Diffusion Language Model Inference via Efficient KV Caching and Guided Diffusion"


@dataclasses.dataclass(frozen=True)
class Frozen(Rewriting):
    """FreeCache: one forward pass over the whole text at the beginning, and no other.

    All later ones recompute the window and the positions after it. Once the window has moved past a position,
    its entry is no longer changed. For tokens that were unmasked last, it was computed while they were still masked.

    Attributes:
        suffix: number of positions from the window's start on that are recomputed; the cache is used for positions
            after them.
        before: number of positions before the window that are recomputed too, and frozen later (FlashDLM's sliding
            window).
        near: True if positions after the suffix are attended to by the first forward pass only.
    """

    suffix: int = 256
    before: int = 0
    near: bool = False

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return view.refreshed < 0

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, max(left, self.before), max(self.suffix, view.positions.shape[1]))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        behind = positions >= (view.start + max(self.suffix, view.positions.shape[1]))[:, None]
        return ~behind if self.near else jnp.ones(positions.shape, bool)


@dataclasses.dataclass(frozen=True)
class GuidedDiffusion(Judged):
    """Guided diffusion: an autoregressive model agrees with the tokens that are among its own likeliest ones.

    Attributes:
        model: the second model: a `Model`, or the result of `decodax.load`.
        top: number of likeliest tokens that are accepted; 1 is the authors' "deterministic" rule, more their "topk".
        relative: minimum probability of an accepted token, divided by that of the likeliest one ("topk_relative").
        weights: the weights of a bare `Model`.
        chunk: number of prompt tokens in a forward pass of its prefill.
    """

    model: Any
    top: int = 1
    relative: float = 0.0
    weights: Any = data()
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise ValueError(f"top: got {self.top}, takes 1 or more")
        if not 0 <= self.relative <= 1:
            raise ValueError(f"relative: got {self.relative}, takes 0 to 1")

    def verdict(self, token: Array, logits: Array, own: Array, draw: Callable[[Array], Array]) -> Array:
        likelihood = jnp.take_along_axis(own, jnp.maximum(token, 0)[..., None], -1)
        # the mask token, which the diffusion model cannot say, has no place in the list
        listed = jnp.where(logits > -jnp.inf, own, -jnp.inf)
        near = likelihood[..., 0] >= listed.max(-1) + jnp.log(jnp.float32(self.relative))
        return ((listed > likelihood).sum(-1) < self.top) & near


@ALGORITHMS.register("freecache", PAPER, "Hu et al. 2025", family="diffusion-cache", needs="a diffusion model")
def freecache(lm: Any, block_length: Count = 32, steps: Count | None = None, suffix: Count = 256) -> MaskedDiffusion:
    """LLaDA's sampler with a cache that is never refreshed: the entries of a block are frozen when it is finished.

    FlashDLM's cache without its guided diffusion; for models with attention in both directions.

    Args:
        block_length: number of positions of a block.
        steps: number of steps of a block. None: one position per step.
        suffix: number of positions that each forward pass recomputes, from the block's start on.
    """
    return MaskedDiffusion(Adapter.of(lm), Blocks(block_length), unmask=Quota(steps), caching=Frozen(suffix))


@ALGORITHMS.register("flashdlm", PAPER, "Hu et al. 2025", family="diffusion-cache",
                     needs="a diffusion model and a draft model")
def flashdlm(lm: Any, draft: Any, top: Count = 1, relative: Share = 0.0,
             window_size: Annotated[int, Range(2)] = 128, lookahead: Count = 32) -> MaskedDiffusion:
    """Unmasks from left to right the tokens with which a small autoregressive model agrees, with FreeCache.

    Guided diffusion with the authors' sliding window. Their code judges all masks of the window, and in the first
    forward pass of the whole text; here a forward pass judges `lookahead` masks. Their cache writes new entries at the
    start of the previous window; here each entry is written at its own position.

    Args:
        draft: loaded autoregressive model with the same vocabulary.
        top: number of the autoregressive model's likeliest tokens that are accepted. 1 is the authors' "deterministic"
            rule, more their "topk".
        relative: minimum probability of an accepted token, divided by that of the likeliest one ("topk_relative").
        window_size: number of positions before the last decided one that are recomputed, and number of masks after it.
            Only the first forward pass computes positions further ahead.
        lookahead: number of masks that are judged at a time.
    """
    return MaskedDiffusion(Adapter.of(lm), Sliding(min(lookahead, window_size - 1)), Position(), Agreed(go_on=False),
                           caching=Frozen(window_size - 1, window_size + 1, near=True),
                           verify=GuidedDiffusion(draft, top, relative))
