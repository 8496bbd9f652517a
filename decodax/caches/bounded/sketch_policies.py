"""Published caches whose size does not grow with the text, each as what its paper puts together; see
`decodax.caches.evict.policies`."""

from __future__ import annotations

from decodax.caches.bounded.frequencies import LowFrequencies
from decodax.caches.bounded.less import LessKernels, Synthesis
from decodax.caches.bounded.sublinear import Sublinearly
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("freqkv", "FreqKV: Frequency Domain Key-Value Compression for Efficient Context Window Extension",
                 "Kai et al. 2025", "the first tokens, and the lower half of the others' frequencies each time that "
                 "there are `size` tokens; prompts too")
def _freqkv(size: int = 4096, sinks: int = 4, ratio: float = 0.5) -> CacheConfig:
    return LowFrequencies(size, sinks, ratio)


@CACHES.register("subgen", "SubGen: Token Generation in Sublinear Time and Memory", "Zandieh et al. 2024",
                 "the latest tokens, and of the others keys that are drawn of clusters and values by their norms")
def _subgen(radius: float | None = None, clusters: int = 256, keys: int = 4, values: int = 256, recent: int = 128,
            every: int = 32, seed: int = 0) -> CacheConfig:
    if radius is None:
        raise ValueError("radius: got none, takes how far a key may lie from the first one of its cluster")
    return Sublinearly(radius, clusters, keys, values, recent, every, seed)


@CACHES.register("less",
                 "Get More with LESS: Synthesizing Recurrence with KV Cache Compression for Efficient LLM Inference",
                 "Dong et al. 2024", "the first tokens and the latest, and a state of constant size that has taken in "
                 "the others through trained kernels (fit_less); prompts too")
def _less(kernels: LessKernels | str | None = None, sinks: int = 4, recent: int = 512) -> CacheConfig:
    if isinstance(kernels, str):
        kernels = LessKernels.load(kernels)
    if not isinstance(kernels, LessKernels):
        raise ValueError(f"kernels: got {'none' if kernels is None else type(kernels).__name__}, takes what "
                         "decodax.train.less trains on a model, or a file that its save wrote")
    return Synthesis(kernels, sinks, recent)
