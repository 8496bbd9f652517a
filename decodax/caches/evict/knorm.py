"""Evicts the tokens whose keys have the largest norms ("A Simple and Effective L2 Norm-Based Strategy for KV Cache
Compression", Devoto et al., 2024)."""

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
class KeyNorm(TokenScore):
    """Scores a token by minus the norm of its key, since keys of small norm attract attention."""

    def __call__(self, held: HeldLayer) -> Array:
        return -jnp.linalg.norm(held.keys, axis=-1)


@CACHES.register("knorm", "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
                 "Devoto et al. 2024", family="evict")
def knorm(budget: Budget = 0.5, every: Every = None, skip_layers: tuple[Whole, ...] = (0, 1)) -> Eviction:
    """Keeps the tokens whose keys have the smallest norms.

    Needs no queries, so it works with any attention and costs nearly nothing.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        skip_layers: numbers of layers that keep all tokens, the first two in the paper; () for none.
    """
    return Eviction(Top(KeyNorm()), budget, every, skip_layers, name="knorm")
