"""TOVA: evicts the token that the newest query attends to least ("Transformers are Multi-State RNNs", Oren et al.,
2024)."""

from __future__ import annotations

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.common.registry import CACHES


@CACHES.register("tova", "Transformers are Multi-State RNNs", "Oren et al. 2024", family="evict")
def tova(budget: Budget = 512, every: Every = 1) -> Eviction:
    """Keeps the tokens that the newest query attends to most, the same ones in all heads of a layer.

    Bounds the memory of long answers: it evicts while decoding, too. `caches.tova(512, every=8)` evicts every 8 tokens.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding; 1 in the paper. None: evict once, after the prompt.
    """
    return Eviction(Top(WindowAttention(1, 1, over="heads")), budget, every, name="tova")
