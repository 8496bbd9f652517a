"""SpecKV: scores tokens by the queries of an answer that a draft model writes ("Draft-based Approximate Inference for
LLMs", Galim et al., 2025).

A draft model writes the beginning of an answer, and the target model prefills it once. The queries of these tokens and
of the latest prompt tokens choose the prompt tokens that each head keeps. The drafted tokens are dropped.

The kept tokens are those of the authors' code (d79e404). The draft has a fixed length, `lookahead_tokens`, so that a
row does not depend on other requests; of equally near neighbours the earlier one is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.drafted import DraftedConfig, decoded, newest_of, paired, read
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.scores import Gathered, HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Top
from decodax.caches.evict.snapkv import Pooling, pooled
from decodax.common.options import Count, Odd
from decodax.common.registry import CACHES
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal


@dataclasses.dataclass(frozen=True)
class DraftQueries(TokenScore):
    """Scores a token by the attention of drafted tokens and of the latest prompt tokens, over all heads of a group.

    Attributes:
        lookahead_tokens: number of drafted tokens; fewer if the text ends.
        window_size: number of latest tokens in the cache, which are always kept. The prompt's newest token follows them
            and is not in the cache yet.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how.
        reduction_type: how the attention of all queries and of the heads of a group is combined.
        eos: ids of the end tokens.
    """

    lookahead_tokens: Count = 64
    window_size: Count = 32
    kernel_size: Odd = 7
    pooling: Pooling = "max"
    reduction_type: Literal["mean", "max"] = "max"
    eos: tuple[int, ...] = ()

    once = True

    @property
    def latest(self) -> int:
        return self.window_size

    @property
    def always(self) -> int:
        return self.window_size

    def of_model(self, lm: Any) -> DraftQueries:
        return dataclasses.replace(self, eos=tuple(lm.eos))

    def beyond(self, longest: int) -> int:
        return self.lookahead_tokens

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        own, params, draft, weights = paired(prompt, cache.kind.name)
        newest = newest_of(prompt, cache.length)
        small = read(draft, weights, prompt.tokens, cache.length, self.lookahead_tokens)
        _, tokens, live = decoded(draft, weights, small, newest, self.lookahead_tokens, self.eos)
        live = jnp.concatenate([jnp.ones((len(live), 1), bool), live], 1)
        window = causal(jnp.concatenate([newest[:, None], tokens], 1), cache.length, live)
        out = own.apply(params, window, cache)
        at = jnp.where(live, window.positions, -1)
        f32 = lambda x: x.astype(jnp.float32)
        return [gathered.replace(rest=(f32(entry.keys), f32(entry.queries), at))
                for gathered, entry in zip(cache.gathered, out.entries, strict=True)]

    def __call__(self, held: HeldLayer) -> Array:
        keys, queries, asked_at = held.gathered.rest        # of the newest token and those that were drafted
        (G, S, d), n = held.keys.shape, len(queries)
        asked_at = jnp.concatenate([held.asked_at, asked_at])
        queries = jnp.concatenate([held.queries, queries])
        both = jnp.concatenate([held.keys, keys.swapaxes(0, 1)], 1)
        scores = jnp.einsum("wgrd,gsd->grws", queries.reshape(len(queries), G, -1, d), both)
        within = (asked_at[-n:] >= 0) & (asked_at[-n:] <= asked_at[:, None])
        seen = jnp.concatenate([held.valid[:, None] & (held.positions[:, None] <= asked_at[:, None]),
                                jnp.broadcast_to(within, (G, *within.shape))], -1)
        weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None])[..., :S] * (asked_at >= 0)[:, None]
        number = weights.shape[1] * jnp.maximum((asked_at >= 0).sum(), 1)
        paid = weights.max((1, 2)) if self.reduction_type == "max" else weights.sum((1, 2)) / number
        early = held.index < (held.count - self.window_size)[:, None]
        return jnp.where(early, pooled(jnp.where(early, paid, 0), self.kernel_size, self.pooling), jnp.inf)


@CACHES.register("speckv", "Draft-based Approximate Inference for LLMs", "Galim et al. 2025", family="evict")
def speckv(draft: Any = None, budget: Budget = 512, lookahead_tokens: Count = 64, window_size: Count = 32,
           kernel_size: Odd = 7, pooling: Pooling = "max", reduction_type: Literal["mean",
                                                                                     "max"] = "max") -> DraftedConfig:
    """Keeps the tokens that SnapKV chooses with the queries of an answer that a draft model writes.

    Evicts once, after the prompt. Use `caches.speckv(draft=small)` with a smaller model of the same tokenizer.

    Args:
        draft: a smaller model from `decodax.load`.
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        lookahead_tokens: number of tokens that the draft model writes.
        window_size: number of latest prompt queries that score the tokens, too; their own tokens are kept.
        kernel_size, pooling: number of neighbouring tokens whose scores are pooled (odd), and how ("mean" or "max").
        reduction_type: how the attention of all queries, and of the heads of a group, is combined.
    """
    score = DraftQueries(lookahead_tokens, window_size, kernel_size, pooling, reduction_type)
    return DraftedConfig.checked(Eviction(Top(score), budget, name="speckv"), draft, "speckv")
