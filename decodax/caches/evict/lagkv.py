"""LagKV: scores tokens by the spread of their channels, relative to the tokens that follow ("LagKV: Lag-Relative
Information of the KV Cache Tells Which Tokens Are Important", Liang et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.common.options import Range, Whole
from decodax.common.registry import CACHES

Lag = Annotated[int, Range(2)]


@dataclasses.dataclass(frozen=True)
class LagRelative(TokenScore):
    """Scores a token by the spread of its channels, relative to the range of these channels in the tokens that follow.

    The tokens after the first ones (the sinks) are cut into lags of `lag_size` tokens. The channels of each token are
    scaled by the minimum and maximum of that channel in the next lag. The standard deviation over the scaled channels
    goes through a softmax over the lag, and the results for keys and values are averaged. The sinks are always kept,
    and so are the last complete lag and the tokens after it. A text shorter than the sinks and two lags keeps its sinks
    and its latest tokens.

    Attributes:
        n_sink: number of first tokens that are always kept.
        lag_size: number of tokens of a lag.
        cross_scoring: whether tokens of different lags are compared; else each lag keeps the same share of its tokens.
    """

    n_sink: Whole = 4
    lag_size: Lag = 128
    cross_scoring: bool = False

    @property
    def always(self) -> int:
        return self.n_sink

    def __call__(self, held: HeldLayer) -> Array:
        lags = (held.count - self.n_sink) // self.lag_size       # whole ones
        most = (held.slots - self.n_sink) // self.lag_size
        late = held.index >= (self.n_sink + (lags - 1) * self.lag_size)[:, None]
        recency = held.index / jnp.maximum(held.count, 1)[:, None].astype(jnp.float32)
        if most < 2:
            return jnp.where(held.index < self.n_sink, jnp.inf, recency)
        worth = (self._spread(held.keys, most) + self._spread(held.values, most)) / 2       # [G, most - 1, lag]
        if not self.cross_scoring:
            worth = jnp.argsort(jnp.argsort(worth, axis=-1), axis=-1) / self.lag_size
        worth = worth.reshape(worth.shape[0], -1)
        after = held.slots - self.n_sink - worth.shape[1]
        worth = jnp.pad(worth, ((0, 0), (self.n_sink, after)))
        worth = jnp.where(late, jnp.inf, worth)
        worth = jnp.where((lags < 2)[:, None], recency, worth)
        return jnp.where(held.index < self.n_sink, jnp.inf, worth)

    def _spread(self, x: Array, lags: int) -> Array:
        parts = x[:, self.n_sink:self.n_sink + lags * self.lag_size].reshape(x.shape[0], lags, self.lag_size, -1)
        own, after = parts[:, :-1], parts[:, 1:]
        low, high = after.min(2, keepdims=True), after.max(2, keepdims=True)
        relative = (own - low) / jnp.where(high > low, high - low, 1)
        return jax.nn.softmax(relative.std(-1, ddof=1), axis=-1)


@CACHES.register("lagkv", "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
                 "Liang et al. 2025", family="evict")
def lagkv(budget: Budget = 0.5, every: Every = None, n_sink: Whole = 4, lag_size: Lag = 128) -> Eviction:
    """Keeps in each lag (block of tokens) those whose channels spread most, relative to the range in the next lag.

    Needs no queries, so it works with any attention. The tokens of the latest one to two lags are always kept.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        n_sink: number of first tokens that are always kept.
        lag_size: number of tokens of a lag.
    """
    return Eviction(Top(LagRelative(n_sink, lag_size)), budget, every, name="lagkv")
