"""PyramidKV: more tokens for the first layers and fewer for the last ("PyramidKV: Dynamic KV Cache Compression based on
Pyramidal Information Funneling", Cai et al., 2024)."""

from __future__ import annotations

import dataclasses

import numpy as np

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.caches.evict.snapkv import Pooling, WindowAttention
from decodax.common.options import Count, Odd
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class Pyramid(Top):
    """Keeps the best tokens of each head, more in the first layers than in the last ones.

    If layers keep `n` tokens beyond the window on average, the last layer keeps `n / beta`, the first layer `2 n - n /
    beta`, and between them the number falls linearly. If the text is shorter than the first layer's number, the first
    layer keeps all of it, and the other numbers rise so that the mean is the same. A budget in tokens is divided with
    integer arithmetic, as by the authors: a text shorter than the budget is kept entirely, and for a text of less than
    `2 n` tokens every layer keeps the budget. A share of the text is divided and rounded as in kvpress.

    Attributes:
        score: score of the tokens.
        beta: steepness of the pyramid.
    """

    score: WindowAttention = WindowAttention()
    beta: Count = 20

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        window = self.score.window_size

        def authors(length: int, budget: int) -> int:
            beyond = budget - window
            if length < budget or depth < 2:
                return min(length, budget)
            if length < 2 * beyond:
                return budget
            most = min(2 * beyond - beyond // self.beta, length - window)
            least = beyond // self.beta if most < length - window else 2 * beyond - most
            return most - layer * ((most - least) // (depth - 1)) + window

        def kvpress(length: int, share: float) -> int:      # counts the window as part of the share
            mean = length * share
            least = mean / self.beta
            most = mean * 2 - least
            if most >= length - window:
                most = length - window
                least = mean * 2 - most
            if depth < 2 or not length >= most >= least >= window:
                return round(mean)
            return round(most - layer * (most - least) / (depth - 1))

        one = authors if isinstance(budget, int) else kvpress
        return np.array([one(n, budget) for n in range(longest + 1)], np.int32)      # type: ignore[arg-type]


@CACHES.register("pyramidkv", "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
                 "Cai et al. 2024", family="evict")
def pyramidkv(budget: Budget = 2048, every: Every = None, window_size: Count = 8, kernel_size: Odd = 7,
              pooling: Pooling = "max", beta: Count = 20) -> Eviction:
    """Keeps the tokens that SnapKV chooses, more of them in the first layers and fewer in the last ones.

    For models whose deep layers attend to few tokens; the layers together take as much memory as with `snapkv`.

    Args:
        budget: tokens that each head keeps, averaged over layers; below 1, a share of the text; or bytes such as
            "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
        beta: the last layer keeps the share `1 / beta` of the mean.
    """
    return Eviction(Pyramid(WindowAttention(window_size, kernel_size, pooling), beta), budget, every, name="pyramidkv")
