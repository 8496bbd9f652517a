"""Fast-dLLM: unmasks all confident positions of a block at once, with an approximate prefix or dual cache ("Fast-dLLM:
Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding", Wu et al., 2025).

Its threshold rule is `decodax.algorithms.diffusion.rules.unmasking.Threshold`, which many other papers share.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Caching, Memory, Score, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy, Of
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Quota, Threshold
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.stats import rank
from decodax.algorithms.diffusion.view import Seen, View, span
from decodax.common.options import Count, Positive, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Factor(Unmask):
    """Fast-dLLM's factor rule: the more candidates are unmasked at once, the more confident each of them must be.

    Candidates are taken by falling confidence `c_r`, with rank `r` from 1, as long as the condition of the variant
    holds; the first one is always taken.

    Attributes:
        factor: the number `f` in the condition.
        variant: "a": `c_r >= 1 - f / (r + 1)`, as in the paper. "b": as in the authors' code, which also takes the last
            of all open positions if it is the only one that fails. "c": `c_r > 1 - f / r`, which takes more.
        of: "model" or "policy", see `Of`.
    """

    factor: float = 1.0
    variant: Literal["a", "b", "c"] = "a"
    of: Of = "model"

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        stats = seen.of(self.of)
        order = rank(stats.log_prob, view.active)
        r = order + 1
        # 1 - p without rounding p to 1 first
        doubt = -jnp.expm1(stats.log_prob)
        sure = doubt * r < self.factor if self.variant == "c" else doubt * (r + 1) <= self.factor
        failed = view.active & ~sure & (order > 0)
        first = jnp.where(failed, order, view.open.shape[1]).min(1)
        count = view.active.sum(1, dtype=jnp.int32)
        if self.variant == "b":
            first = jnp.where(first == count - 1, count, first)
        return view.active & (order < jnp.maximum(first, 1)[:, None])


@dataclasses.dataclass(frozen=True)
class DualCache(Caching):
    """Fast-dLLM's dual cache: one wide forward pass, over the whole text, when a block begins. Until the block is
    finished, narrow ones, over the block, attend to its entries of all other positions.

    Attributes:
        refresh: number of steps after which there is another wide forward pass; with 1 each is wide, as without a
            cache. None: there is none.
        anchored: if logits predict the next position, True does not recompute the position before the block, which
            predicts the block's first token. Wide forward passes must then unmask that token (Fast-dLLM's code for
            Dream; see `Anchored`).
    """

    refresh: int | None = None
    anchored: bool = False
    approximate = True

    def __post_init__(self) -> None:
        if self.refresh is not None and self.refresh < 1:
            raise ValueError(f"refresh: got {self.refresh}, takes 1 or more")

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        begins = (view.step == 0) | (view.refreshed < 0)
        return begins if self.refresh is None else begins | (view.round - view.refreshed >= self.refresh)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, 0 if self.anchored else left, view.positions.shape[1])

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return ~valid       # in wide rounds everything, in narrow ones nothing


@dataclasses.dataclass(frozen=True)
class PrefixCache(DualCache):
    """Fast-dLLM's prefix cache: a narrow forward pass recomputes the block and the positions after it.

    Attributes:
        suffix: number of positions, from the block's start on, that are recomputed. In the published rule it is at
            least the number of new tokens. The cache is used for all positions after them.
    """

    suffix: int = 256

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, 0 if self.anchored else left, max(self.suffix, view.positions.shape[1]))


@ALGORITHMS.register("fast-dllm", "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and "
                     "Parallel Decoding", "Wu et al. 2025", family="diffusion-cache", needs="a diffusion model")
def fast_dllm(lm: Any, block_length: Count = 32, threshold: Share | None = 0.9, steps: Count | None = None,
              factor: Positive | None = None, variant: Literal["a", "b", "c"] = "a",
              cache: Literal["dual", "prefix", "none"] = "dual", suffix: Count = 256) -> MaskedDiffusion:
    """Unmasks all confident positions of a block at once, with a prefix or dual cache that is refreshed for each block.

    The common choice for LLaDA and Dream. With a cache, a model whose logits predict the next position decides as in
    the authors' code for Dream; see `Anchored`. Its quotas are by entropy along the noise schedule, as Dream's.

    Args:
        block_length: number of positions of a block.
        threshold: minimum probability of a candidate that is unmasked. None without a factor: quotas of `steps` steps
            for each block, so that only the cache is Fast-dLLM's.
        steps: number of steps of a block, for the quotas. None: one position per step.
        factor: replaces the threshold by the factor rule. None: the threshold.
        variant: variant of the factor rule. "a" is the paper's. The authors' code ("b") also takes the last open
            position if it alone fails, which the paper's bound does not cover. "c" takes more.
        cache: "dual" recomputes the block, "prefix" the block and the positions after it, "none" all positions.
        suffix: number of positions that the prefix cache recomputes, from the block's start on; at least the number of
            new tokens in the paper.
    """
    adapter = Adapter.of(lm)
    anchored = adapter.shift and cache != "none"
    score: Score = Confidence()
    unmask: Unmask
    if factor is not None:
        unmask = Factor(factor, variant)
    elif threshold is not None:
        unmask = Threshold(threshold)
    elif anchored:
        score, unmask = NegEntropy("policy"), Quota(block_length if steps is None else steps, "time")
    else:
        unmask = Quota(steps)
    if cache == "none":
        return MaskedDiffusion(adapter, Blocks(block_length), score, unmask)
    caching = DualCache(anchored=anchored) if cache == "dual" else PrefixCache(anchored=anchored, suffix=suffix)
    return MaskedDiffusion(adapter, Blocks(block_length), score, Anchored(unmask) if anchored else unmask,
                           caching=caching)
