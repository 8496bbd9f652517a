"""Drafts of the target itself on a smaller cache."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from decodax import caches
from decodax.algorithms.entries.shared import (
    BOTH,
    SELF,
    TARGET,
)
from decodax.algorithms.speculative import SeedExact, Speculative, drafts, trees
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Top
from decodax.caches.evict.triforce import ChunkMeans
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.quantize.quantspec import QuantSpecCodec
from decodax.caches.sparse.specache import Prefetch, SpeCache
from decodax.common.registry import ALGORITHMS
from decodax.io.quantize import quantize


@ALGORITHMS.register("magicdec", "MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with "
                     "Speculative Decoding", "Sadhukhan et al. 2024",
                     "the target on what SnapKV, or sinks and a window, keep of the prompt", family=SELF, needs=TARGET,
                     guarantee="seed-exact")
def _magicdec(lm: Any, budget: int = 512, keep: Literal["snapkv", "sink-window"] = "snapkv", length: int = 4) -> Any:
    chosen: dict[str, dict[str, Any]] = {
        "snapkv": dict(budget=budget, window_size=min(32, max(budget // 4, 1))),
        "sink-window": dict(budget=budget, every=None)}
    if keep not in chosen:
        raise ValueError(f"keep: got {keep!r}, takes one of {', '.join(chosen)}")
    return Speculative(drafts.OwnCache(lm, caches.make(keep, **chosen[keep])), SeedExact(), trees.Chain(length))


@ALGORITHMS.register("triforce", "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical "
                     "Speculative Decoding", "Sun et al. 2024", "the target on chunks of its cache that the newest "
                     "query chose; a draft model guesses for it, on sinks and a window", family=SELF, needs=BOTH,
                     guarantee="seed-exact")
def _triforce(lm: Any, draft: Any, budget: int = 4096, chunk: int = 8, length: int = 6, guesses: int = 1,
              sinks: int = 16, recent: int = 496) -> Any:
    ring = caches.make("streaming-llm", start_size=sinks, recent_size=recent)
    small = dataclasses.replace(draft, model=draft.model.with_cache(ring))
    middle = drafts.OwnCache(lm, Eviction(Top(ChunkMeans(chunk)), budget, name="triforce"))
    return Speculative(drafts.Staged(middle, drafts.DraftModel(small), length, guesses=guesses))


@ALGORITHMS.register("specache", "SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs",
                     "Jie et al. 2025", "a low-bit cache, and in full the positions that a guess of the token looked "
                     "at, from the host's memory", family=SELF, needs=TARGET, guarantee="approximate")
def _specache(lm: Any, bits: int = 2, top: int = 64, group: int = 32, residual: int = 32) -> Any:
    return SpeCache(Prefetch(bits, top, group, residual))


@ALGORITHMS.register("quantspec", "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
                     "Tiwari et al. 2025", "the target with weights of 4 bits, on 4 bits of a cache of 8; equals "
                     "plain decoding on that cache", family=SELF, needs=TARGET, guarantee="approximate")
def _quantspec(lm: Any, group: int = 128, length: int = 4, weights: str | None = "int4") -> Any:
    cache = QuantizedConfig(QuantSpecCodec(group), group, "quantspec")
    packed = None if weights is None else quantize(lm, weights)
    return Speculative(drafts.OwnCache(lm, cache, True, packed), SeedExact(), trees.Chain(length))
