"""Published policies that ask a smaller model, each as what its paper puts together; see
`decodax.caches.evict.policies`."""

from __future__ import annotations

from typing import Any, Literal

from decodax.caches.evict.draft_queries import DraftQueries
from decodax.caches.evict.drafted import Drafted
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Budget, Top
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig
from decodax.core.loaded import Loaded


def _asking(kind: CacheConfig, draft: Any, name: str) -> CacheConfig:
    if not isinstance(draft, Loaded):
        raise ValueError(f"draft: got {'none' if draft is None else type(draft).__name__}, takes a smaller model with "
                         "the same tokenizer, as decodax.load gives it")
    return Drafted(kind, draft, name)


@CACHES.register("speckv", "Draft-based Approximate Inference for LLMs", "Galim et al. 2025",
                 "SnapKV with the queries of an answer that a draft model writes; for prompts alone")
def _speckv(draft: Any = None, budget: Budget = 512, tokens: int = 64, window: int = 32, kernel: int = 7,
            pool: Literal["mean", "max"] = "max", reduce: Literal["mean", "max"] = "max") -> CacheConfig:
    score = DraftQueries(tokens, window, kernel, pool, reduce)
    return _asking(Eviction(Top(score), budget, name="speckv"), draft, "speckv")
