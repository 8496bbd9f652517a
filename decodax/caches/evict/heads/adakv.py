"""Ada-KV: the heads of a layer share their budget ("Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation
for Efficient LLM Inference", Feng et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.expected_attention import ExpectedAttention
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Selection, best, whole
from decodax.caches.evict.snapkv import Pooling, WindowAttention
from decodax.common.options import Count, NonNegative, Odd, Range, Share, Whole
from decodax.common.registry import CACHES

HeadCap = Annotated[float, Range(1)] | None
"""Maximum number of tokens of one head, as a multiple of the budget; it bounds the memory of a head. None: no bound."""


@dataclasses.dataclass(frozen=True)
class AdaptiveHeads(Selection):
    """Keeps the best tokens of all heads of a layer together: heads with better tokens keep more of them.

    Attributes:
        score: score of the tokens.
        floor_alpha: share of the budget that each head keeps at least.
        head_cap: see `HeadCap`.
    """

    score: TokenScore
    floor_alpha: Share = 0.2
    head_cap: HeadCap = None

    uniform = False

    def slots(self, table: np.ndarray, heads: int) -> int:
        even = int(table.max())
        own = even * heads - (heads - 1) * int(even * self.floor_alpha)
        return min(len(table) - 1, own if self.head_cap is None else min(own, int(even * self.head_cap)))

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        return int(table.max()) * heads

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return self.shared(self.score(held), held.valid, count)

    def shared(self, worth: Array, valid: Array, count: Array) -> Array:
        """Returns a mask of the best tokens of all heads together, `bool[G, S]`: `count` tokens for each head on
        average.

        Args:
            worth: `f32[G, S]`, scores.
            valid: `bool[G, S]`, filled slots.
            count: `i32[]`, mean number of tokens of a head.
        """
        safe = best(worth, valid, whole(count, self.floor_alpha))
        worth = jnp.where(safe, jnp.inf, worth)
        if self.head_cap is not None:
            valid = best(worth, valid, jnp.floor(count * self.head_cap).astype(jnp.int32))
        total = jnp.minimum(count * worth.shape[0], valid.sum())
        return best(worth.reshape(1, -1), valid.reshape(1, -1), total).reshape(valid.shape)


@CACHES.register("adakv",
                 "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
                 "Feng et al. 2024", family="evict")
def adakv(budget: Budget = 1024, every: Every = None, window_size: Count = 32, kernel_size: Odd = 7,
          pooling: Pooling = "max", floor_alpha: Share = 0.2, head_cap: HeadCap = None) -> Eviction:
    """Keeps the tokens that SnapKV chooses, with one budget for all heads of a layer.

    Better than SnapKV in the same memory, since heads that attend to few tokens leave slots to the others.

    Args:
        budget: tokens that each head keeps on average; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
        floor_alpha: share of the budget that each head keeps at least.
        head_cap: a head keeps at most this multiple of the budget. None: no bound.
    """
    score = WindowAttention(window_size, kernel_size, pooling)
    return Eviction(AdaptiveHeads(score, floor_alpha, head_cap), budget, every, name="adakv")


@CACHES.register("adaptive-expected-attention",
                 "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
                 "Devoto et al. 2025", family="evict")
def adaptive_expected_attention(budget: Budget = 0.5, every: Every = None, n_sink: Whole = 4,
                                n_future_positions: Count = 512, epsilon: NonNegative = 0.01, floor_alpha: Share = 0.2,
                                head_cap: HeadCap = None) -> Eviction:
    """Keeps the tokens that Expected Attention chooses, with one budget for all heads of a layer.

    The authors of the paper evaluate this form.

    Args:
        budget: tokens that each head keeps on average; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        n_sink: number of first tokens that are always kept.
        n_future_positions: number of next positions over which the rotation of queries is averaged.
        epsilon: added to the expected attention before it is multiplied by the norm of the value.
        floor_alpha: share of the budget that each head keeps at least.
        head_cap: a head keeps at most this multiple of the budget. None: no bound.
    """
    score = ExpectedAttention(n_sink, n_future_positions, epsilon=epsilon)
    return Eviction(AdaptiveHeads(score, floor_alpha, head_cap), budget, every, name="adaptive-expected-attention")
