"""SpeCache: decodes with a low-bit cache, and prefetches from host memory the entries to which a guess of the next
token attends ("SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs", Jie et al., 2025). The cache
is in `decodax.caches.sparse.specache`."""

from __future__ import annotations

from typing import Annotated

from decodax.caches.sparse.specache import SpeCache, SpeCacheConfig
from decodax.common.options import Count, Range
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("specache", "SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs",
                     "Jie et al. 2025", family="speculative-self", guarantee="approximate")
def specache(bits: Annotated[int, Range(1, 2)] = 2, top: Count = 64, group_size: Count = 32,
             residual_length: Count = 32) -> SpeCache:
    """Decodes with a low-bit cache, and with full keys and values at the positions to which a guess of the next token
    attended.

    For contexts that do not fit in the device's memory: full keys and values are kept in host memory.

    Args:
        bits: number of bits of each number in the low-bit cache.
        top: number of positions fetched from host memory.
        group_size: number of values that share a scale.
        residual_length: number of tokens that are quantized together; the latest tokens, fewer than this, are kept in
            full precision.
    """
    return SpeCache(SpeCacheConfig(bits, top, group_size, residual_length))
