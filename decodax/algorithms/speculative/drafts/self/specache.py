"""SpeCache: decodes with a low-bit cache and prefetches from the host what a guess of the token attends to ("SpeCache:
Speculative Key-Value Caching for Efficient Generation of LLMs", Jie et al., 2025). The cache is in
`decodax.caches.sparse.specache`."""

from __future__ import annotations

from typing import Annotated, Any

from decodax.caches.sparse.specache import SpeCache, SpeCacheConfig
from decodax.common.options import Count, Range
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("specache", "SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs",
                     "Jie et al. 2025", family="speculative-self", needs="a model", guarantee="approximate")
def specache(lm: Any, bits: Annotated[int, Range(1, 2)] = 2, top: Count = 64, group_size: Count = 32,
             residual_length: Count = 32) -> SpeCache:
    """Decodes on a low-bit cache, and in full on the positions that a guess of the token attended to.

    For contexts that do not fit the device: full keys and values stay in the host's memory.

    Args:
        lm: the target. bits: bits of a number of the low-bit cache. top: positions fetched from the host.
        group_size: numbers that share a scale.
        residual_length: tokens that are quantized together; the latest, fewer than that, are kept in full.
    """
    return SpeCache(SpeCacheConfig(bits, top, group_size, residual_length))
