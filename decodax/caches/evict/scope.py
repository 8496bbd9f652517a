"""SCOPE: separate budgets for the prompt and for the tokens after it ("SCOPE: Optimizing Key-Value Cache Compression in
Long-context Generation", Wu et al., 2024).

With `slide` and `adaptive` tokens are evicted at the authors' steps. With `discontinuous` they are chosen every 15
tokens of a row; the authors' counters run over all rows and layers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer
from decodax.caches.evict.selection import Budget, Selection, best
from decodax.caches.evict.snapkv import Pooling, WindowAttention
from decodax.common.options import Count, Odd
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class DecodePool(Selection):
    """Never evicts the chosen tokens of the prompt again, and keeps a pool of the tokens after it: the latest ones, and
    of the older ones those with the largest attention of the newest query.

    Attributes:
        score: score of the prompt's tokens.
        heavy: maximum number of older tokens in the pool.
        recent: number of latest tokens in the pool.
        grows: "at once": the pool has up to `heavy` older tokens from the start. "by steps": it begins with none, and
            gets one more for every `delta` tokens, up to `heavy`.
        delta: number of tokens after which the pool grows by one, for "by steps".
    """

    score: WindowAttention
    heavy: Count = 768
    recent: Count = 256
    grows: Literal["at once", "by steps"] = "at once"
    delta: Count = 15

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) + self.heavy + self.recent

    def choose(self, held: HeldLayer, count: Array) -> Array:
        later = held.positions >= held.prompt_length
        paid = held.attention()[:, :, -1].mean(1)
        worth = jnp.where(held.index >= (held.count - self.recent)[:, None], jnp.inf, paid)
        new = held.length - held.prompt_length
        grown: Array | int = self.heavy if self.grows == "at once" else jnp.minimum((new - 1) // self.delta, self.heavy)
        pool = held.valid & later & best(jnp.where(later, worth, -1), held.valid, jnp.asarray(self.recent + grown))
        prompt = best(self.score(held), held.valid, count)
        return jnp.where(new > 0, pool | (held.valid & ~later), prompt)


@CACHES.register("scope", "SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation", "Wu et al. 2024",
                 family="evict")
def scope(budget: Budget = 2048, decoding_window_size: Count = 1024, decoding_recent_size: Count = 256,
          scheme: Literal["slide", "adaptive", "discontinuous"] = "slide", delta: Count = 15, window_size: Count = 8,
          kernel_size: Odd = 7, pooling: Pooling = "max") -> Eviction:
    """Keeps the prompt tokens that SnapKV chooses for good, and a bounded pool of the tokens after it.

    For long answers to long prompts: tokens of the answer do not displace tokens of the prompt.

    Args:
        budget: tokens of the prompt that each head keeps; below 1, a share of it; or bytes such as "64MB".
        decoding_window_size: maximum number of tokens of the pool.
        decoding_recent_size: number of latest tokens in the pool; the others are those with the largest attention of
            the newest query.
        scheme: "slide": the pool has its full size from the start, and evicts at each token. "adaptive": the pool grows
            by one token every `delta` tokens, and evicts at each token. "discontinuous": it grows in the same way, and
            evicts every `delta` tokens.
        delta: number of tokens after which the pool grows, see `scheme`.
        window_size: number of latest prompt queries that score the prompt's tokens; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
    """
    if decoding_recent_size >= decoding_window_size:
        raise ValueError(f"decoding_recent_size: got {decoding_recent_size}, takes less than the "
                         f"{decoding_window_size} tokens of the pool")
    select = DecodePool(WindowAttention(window_size, kernel_size, pooling), decoding_window_size - decoding_recent_size,
                        decoding_recent_size, "at once" if scheme == "slide" else "by steps", delta)
    return Eviction(select, budget, delta if scheme == "discontinuous" else 1, name="scope")
