"""H2O: keeps the tokens that have received the most attention (heavy hitters) and the latest ones ("H2O: Heavy-Hitter
Oracle for Efficient Generative Inference of Large Language Models", Zhang et al., 2023).

Also kvpress's "observed attention", which divides the attention by the number of queries that could attend to a token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import Gathered, HeldLayer, Taken, TokenScore
from decodax.caches.evict.selection import Budget, Every, Top, best
from decodax.common.options import Whole
from decodax.common.registry import CACHES
from decodax.pallas_kernels.window_attention import slot_weights


@dataclasses.dataclass(frozen=True)
class Accumulated(TokenScore):
    """Scores a token by the attention that it has received from all queries so far, its own included.

    Attributes:
        recent: number of latest tokens that are always kept.
        mean: divide by the number of queries that could attend to the token, so that early tokens have no advantage
            (kvpress, ZipCache).
        every: number of tokens between two evictions, whose queries are counted at the second one. None: there is one
            eviction.
        sinks: number of first tokens that are always kept.
        over: "group": each group of heads has its own scores. "heads": all heads of a layer share the mean (PrefixKV).
    """

    recent: Whole = 0
    mean: bool = False
    every: Every = None
    sinks: Whole = 0
    over: Literal["group", "heads"] = "group"

    reads = "attention"
    latents = True

    @property
    def latest(self) -> int:
        return self.every or 0

    @property
    def always(self) -> int:
        return self.recent + self.sinks

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), jnp.float32))

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        paid = slot_weights(new.queries, new.sums, new.positions, new.kv, slot_positions=new.held, scale=1.0,
                            causal=True)
        return gathered.replace(slots=gathered.slots + paid)

    def renew(self, held: HeldLayer) -> Any:
        weights = jnp.where((held.asked_at >= held.since)[:, None], held.attention(), 0)
        return held.gathered.slots + weights.sum((1, 2))

    def __call__(self, held: HeldLayer) -> Array:
        paid = held.gathered.slots
        if self.mean:
            paid = paid / jnp.maximum(held.length - held.positions, 1)
        if self.over == "heads":
            paid = jnp.broadcast_to(paid.mean(0), paid.shape)
        stays = (held.index >= (held.count - self.recent)[:, None]) | (held.positions < self.sinks)
        return jnp.where(stays, jnp.inf, paid)


@dataclasses.dataclass(frozen=True)
class LatestHalf(Top):
    """Keeps the latest tokens in half of the budget (rounded down), and in the rest the tokens of highest score, in
    each head."""

    def choose(self, held: HeldLayer, count: Array) -> Array:
        latest = held.index >= (held.count - count // 2)[:, None]
        return best(jnp.where(latest, jnp.inf, self.score(held)), held.valid, count)


@CACHES.register("h2o", "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
                 "Zhang et al. 2023", family="evict")
def h2o(budget: Budget = 1024, recent_size: Whole | None = None, every: Every = 32) -> Eviction:
    """Keeps the tokens that have received the most attention, and the latest ones.

    Bounds the memory of long answers: it evicts while decoding, too. The authors evict a token at each step
    (`every=1`).

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        recent_size: number of latest tokens among the kept ones. None: half of the budget, as in the paper.
        every: tokens between evictions while decoding. None: evict once, after the prompt.
    """
    score = Accumulated(recent_size or 0, every=every)
    return Eviction(LatestHalf(score) if recent_size is None else Top(score), budget, every, name="h2o")


@CACHES.register("observed-attention", "Observed attention", "kvpress 2024", family="evict")
def observed_attention(budget: Budget = 0.5, every: Every = None) -> Eviction:
    """Keeps the tokens with the largest mean attention over the queries that could attend to them.

    Like H2O, but with the mean in place of the sum, which favours early tokens, and without a share for the latest
    tokens.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
    """
    return Eviction(Top(Accumulated(mean=True, every=every)), budget, every, name="observed-attention")
