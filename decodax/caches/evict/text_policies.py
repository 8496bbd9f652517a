"""A published cache that knows sentences. It moves to `decodax.caches.sparse`."""

from __future__ import annotations

from decodax.caches.sparse.sentences import SentenceRetrieval
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("sentence-kv", "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
                 "Zhu et al. 2025", "SnapKV's of a prompt, three times what is read; each query reads the sentences "
                 "that are like the one being written, the first tokens and the latest")
def _sentence_kv(ends: tuple[int, ...] | None = None, budget: int = 1024, factor: float = 3.0, sinks: int = 32,
                 recent: int = 32, threshold: int = 1, window: int = 32, kernel: int = 7) -> CacheConfig:
    return SentenceRetrieval(ends, budget, factor, sinks, recent, threshold, window, kernel)
