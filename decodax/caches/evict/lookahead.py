"""Tokens by the attention of queries that are yet to come ("Lookahead Q-Cache: Achieving More Consistent KV Cache
Eviction via Pseudo Query", Wang et al., 2025).

The first tokens of an answer are decoded on what SnapKV keeps of the prompt. Their queries are close to those that
decoding on the whole cache would have, closer than the prompt's own. With the latest of these they choose from the
whole prompt. What was decoded is forgotten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.caches.evict.evicting import Evicting
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.query_scores import WindowAttention, pooled
from decodax.caches.evict.scores import Gathered, TokenScore
from decodax.caches.evict.selection import Top
from decodax.core.cache import ReadPrompt
from decodax.core.window import causal


@dataclasses.dataclass(frozen=True)
class QueriesAhead(TokenScore):
    """The attention that the queries of tokens to come and the latest ones of the prompt pay.

    Attributes:
        tokens: how many are run ahead, fewer where a text ends. The first is the prompt's newest, which is not in the
            cache yet. window: latest queries of what is (LAQ++; 0: LAQ); their tokens stay.
        first: what the small copy is chosen by; it looks at `window + tokens` queries or more.
        eos: ids that end a text.
    """

    tokens: int = 8
    window: int = 8
    first: WindowAttention = WindowAttention(32, 7, "max")
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.window < 0:
            raise ValueError(f"tokens, window: got {self.tokens} and {self.window}, takes 1 and 0 or more")
        if self.first.window < self.tokens + self.window:
            raise ValueError(f"first: got a window of {self.first.window}, takes one of the {self.tokens} tokens ahead "
                             f"and the {self.window} before them, or a larger one")

    @property
    def latest(self) -> int:
        return self.first.window

    @property
    def once(self) -> bool:
        return True

    @property
    def always(self) -> int:
        return self.latest

    def of_model(self, lm: Any) -> QueriesAhead:
        return dataclasses.replace(self, eos=tuple(lm.eos))

    def beyond(self, longest: int) -> int:
        return self.tokens

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        # no choice comes while it decodes; one that could come keeps the queries
        kind = dataclasses.replace(cache.kind, selection=Top(self.first), every=self.tokens + 1, new=self.tokens)
        small = cache.replace(kind=kind).settled(prompt)
        last = jnp.minimum(cache.length, prompt.tokens.shape[1] - 1)
        newest = jnp.take_along_axis(prompt.tokens, last[:, None], 1)[:, 0]

        def step(carry: tuple[Evicting, Array, Array], _: None) -> tuple[tuple[Evicting, Array, Array], None]:
            small, token, ended = carry
            window = causal(token[:, None], small.length, ~ended[:, None])
            out = prompt.model.apply(prompt.params, window, small)
            small = small.commit(out.entries, jnp.where(ended[:, None], -1, window.positions))
            token = out.logits()[:, 0].argmax(-1).astype(jnp.int32)
            return (small, token, ended | jnp.isin(token, jnp.asarray(self.eos, jnp.int32))), None

        (small, _, _), _ = lax.scan(step, (small, newest, jnp.zeros(newest.shape, bool)), None, self.tokens)
        order = (small.length[:, None] + jnp.arange(self.latest, dtype=jnp.int32)) % self.latest     # the oldest first
        back = small.length - cache.length + self.window
        asks = jnp.arange(self.latest, dtype=jnp.int32) >= self.latest - back[:, None]
        asked_at = jnp.where(asks, small.length[:, None] - self.latest + jnp.arange(self.latest, dtype=jnp.int32), -1)
        take = lambda ring: jnp.take_along_axis(ring, order[:, None, :, None], 2).swapaxes(1, 2).astype(jnp.float32)
        return [own.replace(rest=(take(ring), asked_at)) for own, ring in
                zip(cache.gathered, small.queries, strict=True)]

    def __call__(self, held: HeldLayer) -> Array:
        queries, asked_at = held.gathered.rest
        weights = held.attention(queries, asked_at)
        paid = weights.sum(2) / jnp.maximum((asked_at >= 0).sum(), 1)
        early = held.index < (held.count - self.window)[:, None]
        paid = pooled(jnp.where(early[:, None], paid, 0), self.first.kernel, self.first.pool)
        return jnp.where(early, paid.mean(1), jnp.inf)
