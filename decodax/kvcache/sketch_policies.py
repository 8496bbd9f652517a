"""Published caches whose size does not grow with the text, each as what its paper puts together; see
`decodax.kvcache.policies`."""

from __future__ import annotations

from decodax.cache.base import CacheConfig
from decodax.kvcache.frequencies import LowFrequencies
from decodax.kvcache.table import cache_policy


@cache_policy("freqkv", "FreqKV: Frequency Domain Key-Value Compression for Efficient Context Window Extension",
              "Kai et al. 2025", "the first tokens, and the lower half of the others' frequencies each time that there "
              "are `size` tokens; prompts too")
def _freqkv(size: int = 4096, sinks: int = 4, ratio: float = 0.5) -> CacheConfig:
    return LowFrequencies(size, sinks, ratio)
