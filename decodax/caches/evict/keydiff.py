"""KeyDiff: evicts the tokens whose keys are most similar to the mean key ("KeyDiff: Key Similarity-Based KV Cache
Eviction for Long-Context LLM Inference in Resource-Constrained Environments", Park et al., 2025).

Here the whole prompt is prefilled before tokens are evicted; the authors evict block by block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore, unit
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class KeyDifference(TokenScore):
    """Scores a token by minus the cosine of its key and the mean of all normalized keys."""

    latents = True

    def __call__(self, held: HeldLayer) -> Array:
        keys = jnp.where(held.valid[..., None], held.keys, 0)
        anchor = unit(keys).sum(1, keepdims=True) / jnp.maximum(held.count, 1)[:, None, None]
        return -(unit(keys) * unit(anchor)).sum(-1)


@CACHES.register("keydiff", "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
                 "Resource-Constrained Environments", "Park et al. 2025", family="evict")
def keydiff(budget: Budget = 2048, every: Every = 128) -> Eviction:
    """Keeps the tokens whose keys differ most from the mean direction of all keys.

    Needs no queries, so it works with any attention, and bounds the memory of long answers.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
    """
    return Eviction(Top(KeyDifference()), budget, every, name="keydiff")
