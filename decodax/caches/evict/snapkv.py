"""SnapKV: evicts the prompt tokens that the latest queries do not attend to ("SnapKV: LLM Knows What You are Looking
for Before Generation", Li et al., 2024).

The attention weights of the latest queries are averaged and pooled over neighbouring tokens, and each head keeps the
tokens with the largest results. Several other papers build on this score: TOVA, PyramidKV, ChunkKV, GraphKV, Ada-KV,
CriticalKV, HeadKV, SCOPE.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.common.options import Count, Odd
from decodax.common.registry import CACHES

Pooling = Literal["mean", "max"]
"""How the scores of neighbouring tokens are pooled; "avgpool" and "maxpool" in the authors' code."""


@dataclasses.dataclass(frozen=True)
class WindowAttention(TokenScore):
    """Scores a token by the attention of the latest queries, pooled over its neighbours. The tokens of these queries
    are always kept.

    Attributes:
        window_size: number of latest queries.
        kernel_size: number of neighbouring tokens that are pooled, odd.
        pooling: "mean" (default of the authors and of kvpress) or "max" (default of Ada-KV).
        reduce: how the attention of the queries is combined: "mean" or "max".
        over: "group": each group of heads has its own scores. "heads": all heads of a layer share the mean (TOVA).
    """

    window_size: Count = 64
    kernel_size: Odd = 5
    pooling: Pooling = "mean"
    reduce: Literal["mean", "max"] = "mean"
    over: Literal["group", "heads"] = "group"

    latents = True

    @property
    def latest(self) -> int:
        return self.window_size

    @property
    def always(self) -> int:
        return self.window_size

    def __call__(self, held: HeldLayer) -> Array:
        weights = held.attention()
        asked = jnp.maximum((held.asked_at >= 0).sum(), 1)
        paid = weights.sum(2) / asked if self.reduce == "mean" else weights.max(2)
        early = held.index < (held.count - self.window_size)[:, None]
        paid = pooled(jnp.where(early[:, None], paid, 0), self.kernel_size, self.pooling)
        worth = paid.mean(1) if self.over == "group" else jnp.broadcast_to(paid.mean((0, 1)), early.shape)
        return jnp.where(early, worth, jnp.inf)


def pooled(x: Array, kernel: int, how: Pooling) -> Array:
    """Pools each value of the last axis with its neighbours, `kernel` values in all; values beyond the ends are 0."""
    around = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(kernel // 2, kernel // 2)])
    parts = jnp.stack([around[..., i:i + x.shape[-1]] for i in range(kernel)])
    return parts.mean(0) if how == "mean" else parts.max(0)


@CACHES.register("snapkv", "SnapKV: LLM Knows What You are Looking for Before Generation", "Li et al. 2024",
                 family="evict")
def snapkv(budget: Budget = 2048, every: Every = None, window_size: Count = 32, kernel_size: Odd = 5,
           pooling: Pooling = "mean") -> Eviction:
    """Keeps the tokens that the latest queries attend to, and their neighbours.

    The common choice for long prompts that end with the question. `caches.snapkv(512)` keeps 512 tokens for each head.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size: number of neighbouring tokens whose scores are pooled, odd.
        pooling: "mean" or "max", how these scores are pooled.
    """
    return Eviction(Top(WindowAttention(window_size, kernel_size, pooling)), budget, every, name="snapkv")
