"""HeadKV: the number of tokens of each head depends on its measured importance ("Not All Heads Matter: A Head-Level KV
Cache Compression Method with Integrated Retrieval and Reasoning", Fu et al., 2024).

`decodax.train.fit_heads` measures the importance of heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer
from decodax.caches.evict.selection import Budget, Selection, best
from decodax.caches.evict.snapkv import Pooling, WindowAttention
from decodax.common.options import Count, NonNegative, Odd, Positive, Range
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class HeadSizes(Selection):
    """Keeps the best tokens of each head; their numbers are fixed, and the budget is ignored.

    Attributes:
        score: score of the tokens.
        sizes: `[L][G]`, number of tokens of each head, including those of the window.
    """

    score: WindowAttention
    sizes: tuple[tuple[int, ...], ...]

    uniform = False

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """Returns the number of tokens that the layer's largest head keeps of each text of 0 to `longest` tokens,
        `i32[longest + 1]`. `budget` is not used."""
        return np.minimum(np.arange(longest + 1), max(self.sizes[layer])).astype(np.int32)

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        return sum(min(len(table) - 1, size) for size in self.sizes[layer])

    def check(self, shapes: Sequence[KVLayer]) -> None:
        super().check(shapes)
        if len(self.sizes) != len(shapes):
            raise ValueError(f"heads: got those of {len(self.sizes)} layers, the model has {len(shapes)}")
        for layer, (own, shape) in enumerate(zip(self.sizes, shapes, strict=True)):
            if len(own) != shape.heads:
                raise ValueError(f"heads: got {len(own)} for layer {layer}, the model has {shape.heads}")

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return best(self.score(held), held.valid, jnp.asarray(self.sizes[held.layer], jnp.int32))


def head_sizes(heads: tuple[tuple[float, ...], ...], budget: int, window_size: int, beta: float,
               temperature: float) -> tuple[tuple[int, ...], ...]:
    """Returns the number of tokens that each head keeps, `[L][G]`.

    Of the `budget - window_size` tokens of each head, the share `1 / beta` goes into a pool, and the head keeps the
    rest. The pool of all heads is divided in proportion to `heads ** temperature`.

    Args:
        heads: importance of each head, `[L][G]`.
        budget: mean number of tokens of a head.
        window_size: number of latest tokens that are always kept.
        beta, temperature: see above.
    """
    worth = np.asarray(heads, np.float64) ** temperature
    beyond = budget - window_size
    pool = int(beyond // beta)
    return tuple(tuple(int(n) for n in row) for row in
                 np.round(worth / worth.sum() * pool * worth.size + beyond - pool).astype(int) + window_size)


@CACHES.register("headkv", "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval "
                 "and Reasoning", "Fu et al. 2024", family="evict")
def headkv(heads: tuple[tuple[NonNegative, ...], ...] = (), budget: Count = 512, beta: Annotated[float, Range(1)] = 1.5,
           temperature: Positive = 1.0, window_size: Count = 8, kernel_size: Odd = 7,
           pooling: Pooling = "max") -> Eviction:
    """Keeps the tokens that SnapKV chooses; the number of tokens of each head depends on its measured importance.

    Evicts once, after the prompt. First measure the heads of a model with `decodax.train.fit_heads`.

    Args:
        heads: importance of each head of each layer, `[L][G]`.
        budget: tokens that each head keeps on average.
        beta: the share `1 / beta` of the budget is divided by importance; each head keeps the rest.
        temperature: exponent of the importance.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
    """
    if not heads:
        raise ValueError("heads: got none, takes the importance of each head of each layer, as "
                         "decodax.train.fit_heads measures it")
    sizes = head_sizes(heads, budget, window_size, beta, temperature)
    return Eviction(HeadSizes(WindowAttention(window_size, kernel_size, pooling), sizes), budget, name="headkv")
