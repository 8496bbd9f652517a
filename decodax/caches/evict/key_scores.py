"""Scores of what a token is: its key, its value, its position. One class is one published rule."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.scores import TokenScore


@dataclasses.dataclass(frozen=True)
class KeyNorm(TokenScore):
    """Keys of a small norm attract attention ("A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    Devoto et al., 2024)."""

    def __call__(self, held: HeldLayer) -> Array:
        return -jnp.linalg.norm(held.keys, axis=-1)


@dataclasses.dataclass(frozen=True)
class SinksAndRecent(TokenScore):
    """The first `sinks` tokens and the latest ones (Xiao et al., 2023, "Efficient Streaming Language Models with
    Attention Sinks"), at their own positions."""

    sinks: int = 4

    @property
    def always(self) -> int:
        return self.sinks

    def __call__(self, held: HeldLayer) -> Array:
        return jnp.where(held.positions < self.sinks, jnp.inf, held.positions.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class KeyDifference(TokenScore):
    """Keys unlike the mean direction of all ("KeyDiff: Key Similarity-Based KV Cache Eviction", Park et al., 2025)."""

    def __call__(self, held: HeldLayer) -> Array:
        keys = jnp.where(held.valid[..., None], held.keys, 0)
        anchor = unit(keys).sum(1, keepdims=True) / jnp.maximum(held.count, 1)[:, None, None]
        return -(unit(keys) * unit(anchor)).sum(-1)


@dataclasses.dataclass(frozen=True)
class LagRelative(TokenScore):
    """How far the channels of a token lie apart, relative to the range of the tokens that follow ("LagKV: Lag-Relative
    Information of the KV Cache Tells Which Tokens Are Important", Liang et al., 2025).

    Behind the sinks the tokens are cut into lags. Each is measured by the smallest and largest value of every channel
    in the next one; the standard deviations over channels go through a softmax over the lag, for keys and for values.
    The last whole lag and what follows it stay, and so do the sinks. A text shorter than `sinks` and two lags keeps its
    sinks and its latest tokens.

    Attributes:
        across: compare tokens of different lags; else each lag keeps the same share.
    """

    sinks: int = 4
    lag: int = 128
    across: bool = False

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.lag < 2:
            raise ValueError(f"sinks, lag: got {self.sinks} and {self.lag}, takes 0 and 2 or more")

    @property
    def always(self) -> int:
        return self.sinks

    def __call__(self, held: HeldLayer) -> Array:
        lags = (held.count - self.sinks) // self.lag       # whole ones
        most = (held.slots - self.sinks) // self.lag
        late = held.index >= (self.sinks + (lags - 1) * self.lag)[:, None]
        recency = held.index / jnp.maximum(held.count, 1)[:, None].astype(jnp.float32)
        if most < 2:
            return jnp.where(held.index < self.sinks, jnp.inf, recency)
        worth = (self._spread(held.keys, most) + self._spread(held.values, most)) / 2       # [G, most - 1, lag]
        if not self.across:
            worth = jnp.argsort(jnp.argsort(worth, axis=-1), axis=-1) / self.lag
        worth = worth.reshape(worth.shape[0], -1)
        behind = held.slots - self.sinks - worth.shape[1]
        worth = jnp.pad(worth, ((0, 0), (self.sinks, behind)))
        worth = jnp.where(late, jnp.inf, worth)
        worth = jnp.where((lags < 2)[:, None], recency, worth)
        return jnp.where(held.index < self.sinks, jnp.inf, worth)

    def _spread(self, x: Array, lags: int) -> Array:
        parts = x[:, self.sinks:self.sinks + lags * self.lag].reshape(x.shape[0], lags, self.lag, -1)
        own, after = parts[:, :-1], parts[:, 1:]
        low, high = after.min(2, keepdims=True), after.max(2, keepdims=True)
        relative = (own - low) / jnp.where(high > low, high - low, 1)
        return jax.nn.softmax(relative.std(-1, ddof=1), axis=-1)


@dataclasses.dataclass(frozen=True)
class Leverage(TokenScore):
    """Approximate leverage of keys and values, each relative to its neighbours ("CurDKV", Sengupta et al., 2025).

    Attributes:
        of: "key", "value", their "average" or their "product".
        local: tokens within which norms are compared; 0: all.
    """

    sinks: int = 4
    of: Literal["key", "value", "average", "product"] = "product"
    local: int = 16

    @property
    def always(self) -> int:
        return self.sinks

    def __call__(self, held: HeldLayer) -> Array:
        keys, values = (self._relative(jnp.where(held.valid, (x ** 2).sum(-1), 0)) for x in (held.keys, held.values))
        worth = {"key": keys, "value": values, "average": (keys + values) / 2, "product": keys * values}[self.of]
        worth = worth / jnp.where(held.valid, worth, 0).sum(-1, keepdims=True)
        return jnp.where(held.index < self.sinks, jnp.inf, worth)

    def _relative(self, x: Array) -> Array:
        if not self.local:
            return x
        parts = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.local))).reshape(x.shape[0], -1, self.local)
        total = parts.sum(-1, keepdims=True)
        return (parts / jnp.where(total > 0, total, 1)).reshape(x.shape[0], -1)[:, :x.shape[1]]


@dataclasses.dataclass(frozen=True)
class Direction(TokenScore):
    """How little a key lies in the direction in which keys are ignored ("Q-Filters: Leveraging QK Geometry for
    Efficient KV Cache Compression", Godey et al., 2025).

    Attributes:
        filters: of each layer and head one direction of `d` numbers, `[L][G][d]`.
    """

    filters: tuple[tuple[tuple[float, ...], ...], ...]

    def __call__(self, held: HeldLayer) -> Array:
        if len(self.filters) != held.depth:
            raise ValueError(f"filters: got those of {len(self.filters)} layers, the model has {held.depth}")
        own = jnp.asarray(self.filters[held.layer], jnp.float32)
        if own.shape != (held.keys.shape[0], held.keys.shape[2]):
            raise ValueError(f"filters: got shape {own.shape} for layer {held.layer}, takes "
                             f"{(held.keys.shape[0], held.keys.shape[2])}")
        return -jnp.einsum("gd,gsd->gs", own, held.keys)


def unit(x: Array) -> Array:
    """Vectors of length 1 in the directions of these."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
