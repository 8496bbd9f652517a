"""Tokens by the attention of what a draft model answers (SpecKV: "Draft-based Approximate Inference for LLMs", Galim et
al., 2025).

A draft model writes the beginning of an answer. The model that answers runs over it once, and the queries of these
tokens and of the prompt's latest ones choose, in each head, what stays of the prompt. What was drafted is forgotten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.drafted import decoded, paired, read
from decodax.caches.evict.evicting import Evicting
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.query_scores import WindowAttention, pooled
from decodax.caches.evict.scores import Gathered, TokenScore
from decodax.core.cache import ReadPrompt
from decodax.core.window import causal


@dataclasses.dataclass(frozen=True)
class DraftQueries(TokenScore):
    """The attention that the queries of drafted tokens and of the prompt's latest ones pay; heads of a group together.

    Attributes:
        tokens: how many are drafted, fewer where a text ends. window: latest tokens of what is in the cache, which
            stay; the prompt's newest token comes behind them.
        kernel, pool: neighbours that are pooled, an odd number, and how. reduce: over queries and the heads of a group.
        eos: ids that end a text.
    """

    tokens: int = 64
    window: int = 32
    kernel: int = 7
    pool: Literal["mean", "max"] = "max"
    reduce: Literal["mean", "max"] = "max"
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        WindowAttention(self.window, self.kernel)       # takes what that does
        if self.tokens < 1:
            raise ValueError(f"tokens: got {self.tokens}, takes 1 or more")

    @property
    def latest(self) -> int:
        return self.window

    @property
    def once(self) -> bool:
        return True

    @property
    def always(self) -> int:
        return self.window

    def of_model(self, lm: Any) -> DraftQueries:
        return dataclasses.replace(self, eos=tuple(lm.eos))

    def beyond(self, longest: int) -> int:
        return self.tokens

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        own, params, draft, weights = paired(prompt, cache.kind.name)
        last = jnp.minimum(cache.length, prompt.tokens.shape[1] - 1)
        newest = jnp.take_along_axis(prompt.tokens, last[:, None], 1)[:, 0]
        behind = read(draft, weights, prompt.tokens, cache.length, self.tokens)
        tokens, live = decoded(draft, weights, behind, newest, self.tokens, self.eos)
        live = jnp.concatenate([jnp.ones((len(live), 1), bool), live], 1)
        window = causal(jnp.concatenate([newest[:, None], tokens], 1), cache.length, live)
        out = own.apply(params, window, cache)
        at = jnp.where(live, window.positions, -1)
        f32 = lambda x: x.astype(jnp.float32)
        return [gathered.replace(rest=(f32(entry[0]), f32(entry[2]), at))
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
        paid = weights.max((1, 2)) if self.reduce == "max" else weights.sum((1, 2)) / number
        early = held.index < (held.count - self.window)[:, None]
        return jnp.where(early, pooled(jnp.where(early, paid, 0), self.kernel, self.pool), jnp.inf)
