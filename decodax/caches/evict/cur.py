"""CurDKV: keeps the tokens with the largest approximate leverage scores ("CurDKV: Value-Guided KV Compression for LLMs
via Approximated CUR Decomposition", Sengupta et al., 2025), as kvpress computes them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.common.options import Whole
from decodax.common.registry import CACHES

LeverageType = Literal["key", "value", "kv_avg", "kv_product"]
"""The score: leverage of the key, leverage of the value, their mean, or their product."""


@dataclasses.dataclass(frozen=True)
class Leverage(TokenScore):
    """Approximate leverage scores of keys and values: squared norms, each divided by the sum over a block of
    neighbours.

    Attributes:
        num_sinks: number of first tokens that are always kept.
        leverage_type: see `LeverageType`.
        local_window_size: number of tokens of a block; 0: norms are not divided.
    """

    num_sinks: Whole = 4
    leverage_type: LeverageType = "kv_product"
    local_window_size: Whole = 16

    @property
    def always(self) -> int:
        return self.num_sinks

    def __call__(self, held: HeldLayer) -> Array:
        keys, values = (self._relative(jnp.where(held.valid, (x ** 2).sum(-1), 0)) for x in (held.keys, held.values))
        worth = {"key": keys, "value": values, "kv_avg": (keys + values) / 2,
                 "kv_product": keys * values}[self.leverage_type]
        worth = worth / jnp.where(held.valid, worth, 0).sum(-1, keepdims=True)
        return jnp.where(held.index < self.num_sinks, jnp.inf, worth)

    def _relative(self, x: Array) -> Array:
        n = self.local_window_size
        if not n:
            return x
        parts = jnp.pad(x, ((0, 0), (0, -x.shape[1] % n))).reshape(x.shape[0], -1, n)
        total = parts.sum(-1, keepdims=True)
        return (parts / jnp.where(total > 0, total, 1)).reshape(x.shape[0], -1)[:, :x.shape[1]]


@CACHES.register("cur", "CurDKV: Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
                 "Sengupta et al. 2025", family="evict")
def cur(budget: Budget = 0.5, every: Every = None, num_sinks: Whole = 4, leverage_type: LeverageType = "kv_product",
        local_window_size: Whole = 16) -> Eviction:
    """Keeps the tokens with the largest leverage of key and value among their neighbours.

    Needs no queries, so it works with any attention.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        num_sinks: number of first tokens that are always kept.
        leverage_type: leverage of keys ("key"), of values ("value"), their mean ("kv_avg") or product ("kv_product").
        local_window_size: number of neighbouring tokens within which norms are compared; 0: all tokens.
    """
    return Eviction(Top(Leverage(num_sinks, leverage_type, local_window_size)), budget, every, name="cur")
