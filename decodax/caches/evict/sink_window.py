"""The first tokens and the latest ones, at their own positions, as in kvpress's StreamingLLM ("Efficient Streaming
Language Models with Attention Sinks", Xiao et al., 2023).

The rule of the paper, which counts positions in the cache, is `decodax.caches.bounded.streaming_llm`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.common.options import Whole
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class SinksAndRecent(TokenScore):
    """Scores a token by its position, so that the latest ones are kept; infinite for the first `n_sink` tokens."""

    n_sink: Whole = 4

    latents = True

    @property
    def always(self) -> int:
        return self.n_sink

    def __call__(self, held: HeldLayer) -> Array:
        return jnp.where(held.positions < self.n_sink, jnp.inf, held.positions.astype(jnp.float32))


@CACHES.register("sink-window", "Efficient Streaming Language Models with Attention Sinks", "Xiao et al. 2023",
                 family="evict")
def sink_window(budget: Budget = 516, n_sink: Whole = 4, every: Every = 1) -> Eviction:
    """Keeps the first tokens and the latest ones, at their own positions.

    This is kvpress's StreamingLLM. The paper's rule is `streaming-llm`: it counts positions in the cache, and does not
    store the whole prompt during prefill.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        n_sink: number of first tokens, the attention sinks.
        every: tokens between evictions while decoding. None: evict once, after the prompt.
    """
    return Eviction(Top(SinksAndRecent(n_sink)), budget, every, name="sink-window")
