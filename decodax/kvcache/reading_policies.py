"""Published ways to read a part of a cache that keeps everything, each as what its paper puts together; see
`decodax.kvcache.policies`."""

from __future__ import annotations

from decodax.cache.base import CacheConfig
from decodax.kvcache.clusters import KeyClusters
from decodax.kvcache.criticality import Critical
from decodax.kvcache.table import cache_policy
from decodax.kvcache.verified import PartialVerification


@cache_policy("clusterkv", "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
              "Liu et al. 2024", "everything; each query reads clusters of tokens whose keys are alike, and the first "
              "tokens and the latest")
def _clusterkv(budget: int = 1024, per: int = 80, sinks: int = 16, every: int = 320, more: int = 8, loops: int = 20,
               seed: int = 0, skip: tuple[int, ...] = (0, 1)) -> CacheConfig:
    return KeyClusters(budget, per, sinks, every, more, loops, seed, skip)


@cache_policy("critiprefill", "CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in "
              "LLMs", "Lv et al. 2024", "everything; a segment of a prompt attends to the blocks before it that are "
              "critical to it")
def _critiprefill(budget: int = 2048, segment: int = 512, block: int = 32, dense: int = 4096, memory: float = 0.25,
                  skip: int = 1) -> CacheConfig:
    return Critical(budget, segment, block, dense, memory, skip)


@cache_policy("specpv", "SpecPV: Improving Self-Speculative Decoding for Long-Context Generation via Partial "
              "Verification", "Tan et al. 2025", "everything; drafts are verified on chosen blocks, and behind each 20 "
              "tokens what was verified so is computed anew from everything")
def _specpv(budget: int = 4096, sinks: int = 2, window: int = 8, block: int = 16, buffer: int = 20) -> CacheConfig:
    return PartialVerification(budget, sinks, window, block, buffer)
