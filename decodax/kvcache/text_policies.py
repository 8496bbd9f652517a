"""Published cache policies that know what a token is, each as what its paper puts together; see
`decodax.kvcache.policies`."""

from __future__ import annotations

from typing import Any

from decodax.cache.base import CacheConfig
from decodax.kvcache.evicting import Eviction
from decodax.kvcache.marks import read_marks
from decodax.kvcache.selection import Budget
from decodax.kvcache.sentences import SentenceRetrieval
from decodax.kvcache.shots import ShotAttention, Shots
from decodax.kvcache.subtasks import SubtaskPruning
from decodax.kvcache.table import cache_policy


@cache_policy("sentence-kv", "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
              "Zhu et al. 2025", "SnapKV's of a prompt, three times what is read; each query reads the sentences that "
              "are like the one being written, the first tokens and the latest")
def _sentence_kv(ends: tuple[int, ...] | None = None, budget: int = 1024, factor: float = 3.0, sinks: int = 32,
                 recent: int = 32, threshold: int = 1, window: int = 32, kernel: int = 7) -> CacheConfig:
    return SentenceRetrieval(ends, budget, factor, sinks, recent, threshold, window, kernel)


@cache_policy("shotkv", "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?", "Liu et al. 2025",
              "whole examples of a prompt, by the mean attention to their tokens, and of what follows single tokens")
def _shotkv(budget: Budget = 2048, pool: int = 512, every: int = 32, window: int = 32,
            separator: Any = None) -> CacheConfig:
    marks = None if separator is None else read_marks(separator, "separator")
    return Eviction(Shots(ShotAttention(window, marks), pool), budget, every, name="shotkv")


@cache_policy("tim", "Beyond Context Limits: Subconscious Threads for Long-Horizon Reasoning", "Luo et al. 2025",
              "everything but lists of subtasks that are finished, given the marks around them; what stands behind is "
              "computed anew")
def _tim(open: Any = (), close: Any = (), depth: int = 2, every: int = 16) -> CacheConfig:
    return SubtaskPruning(read_marks(open, "open"), read_marks(close, "close"), depth, every)
