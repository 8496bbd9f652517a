"""LAQ: scores tokens by the queries of tokens that are decoded ahead ("Lookahead Q-Cache: Achieving More Consistent KV
Cache Eviction via Pseudo Query", Wang et al., 2025).

The first tokens of an answer are decoded with the prompt tokens that SnapKV keeps. Their queries are closer to those of
decoding with the full cache than the prompt's own queries are. Together with the latest prompt queries they score all
tokens of the prompt. The tokens that were decoded ahead are dropped.

The kept tokens are those of the authors' code (74612bd) except for its mask: here the tokens that are decoded ahead
attend to the whole prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.drafted import decoded, newest_of
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.scores import Gathered, HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Top
from decodax.caches.evict.snapkv import Pooling, WindowAttention, pooled
from decodax.common.options import Count, Odd, Whole
from decodax.common.registry import CACHES
from decodax.core.capabilities import ReadPrompt


@dataclasses.dataclass(frozen=True)
class LookaheadQueries(TokenScore):
    """Scores a token by the attention of the tokens decoded ahead, and of the latest prompt tokens.

    Attributes:
        max_lookahead_size: number of tokens that are decoded ahead; fewer if the text ends. The first of them follows
            the prompt's newest token, which is not in the cache yet.
        stage2_window_size: number of latest prompt queries that count, too; their tokens are kept (LAQ++). 0: none
            (LAQ).
        first: SnapKV's score for the first stage. Its window must be large enough for the queries of both stages.
        eos: ids of the end tokens.
    """

    max_lookahead_size: Count = 8
    stage2_window_size: Whole = 8
    first: WindowAttention = WindowAttention(32, 7, "max")
    eos: tuple[int, ...] = ()

    once = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first.window_size < self.max_lookahead_size + self.stage2_window_size:
            raise ValueError(f"lookahead_window_size: got {self.first.window_size}, takes the "
                             f"{self.max_lookahead_size} tokens ahead and the {self.stage2_window_size} before them, "
                             "or more")

    @property
    def latest(self) -> int:
        return self.first.window_size

    @property
    def always(self) -> int:
        return self.latest

    def of_model(self, lm: Any) -> LookaheadQueries:
        return dataclasses.replace(self, eos=tuple(lm.eos))

    def beyond(self, longest: int) -> int:
        return self.max_lookahead_size

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        # `every` is longer than the decoding, so nothing is evicted then, but the queries are kept
        more = self.max_lookahead_size
        kind = dataclasses.replace(cache.kind, selection=Top(self.first), every=more + 1, new=more)
        small = cache.replace(kind=kind).finish_prefill(prompt)
        newest = newest_of(prompt, cache.length)
        small, _, _ = decoded(prompt.model, prompt.params, small, newest, more, self.eos)
        order = (small.length[:, None] + jnp.arange(self.latest, dtype=jnp.int32)) % self.latest     # the oldest first
        back = small.length - cache.length + self.stage2_window_size
        asks = jnp.arange(self.latest, dtype=jnp.int32) >= self.latest - back[:, None]
        asked_at = jnp.where(asks, small.length[:, None] - self.latest + jnp.arange(self.latest, dtype=jnp.int32), -1)
        take = lambda ring: jnp.take_along_axis(ring, order[:, None, :, None], 2).swapaxes(1, 2).astype(jnp.float32)
        return [own.replace(rest=(take(ring), asked_at)) for own, ring in
                zip(cache.gathered, small.queries, strict=True)]

    def __call__(self, held: HeldLayer) -> Array:
        queries, asked_at = held.gathered.rest
        weights = held.attention(queries, asked_at)
        paid = weights.sum(2) / jnp.maximum((asked_at >= 0).sum(), 1)
        early = held.index < (held.count - self.stage2_window_size)[:, None]
        paid = pooled(jnp.where(early[:, None], paid, 0), self.first.kernel_size, self.first.pooling)
        return jnp.where(early, paid.mean(1), jnp.inf)


@CACHES.register("laq", "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query",
                 "Wang et al. 2025", family="evict")
def laq(budget: Budget = 512, max_lookahead_size: Count = 8, stage2_window_size: Whole = 8, kernel_size: Odd = 7,
        pooling: Pooling = "max", lookahead_window_size: Count = 32) -> Eviction:
    """Keeps the tokens that SnapKV chooses with the queries of tokens that are decoded ahead.

    Evicts once, after the prompt; costs `max_lookahead_size` extra decoding steps. The options are those of the
    authors' code.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        max_lookahead_size: number of tokens that are decoded ahead.
        stage2_window_size: number of latest prompt queries that score the tokens, too; their own tokens are kept
            (LAQ++). 0: none (LAQ).
        kernel_size: number of neighbouring tokens whose scores are pooled, odd; in both stages.
        pooling: "mean" or "max", how these scores are pooled.
        lookahead_window_size: number of latest queries by which SnapKV chooses the tokens for decoding ahead.
    """
    first = WindowAttention(lookahead_window_size, kernel_size, pooling)
    return Eviction(Top(LookaheadQueries(max_lookahead_size, stage2_window_size, first)), budget, name="laq")
