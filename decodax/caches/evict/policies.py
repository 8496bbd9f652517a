"""Published caches that are no evictions, each as a function of its options. They move to the shelves of their own."""

from __future__ import annotations

from decodax.caches.evict.selection import Budget
from decodax.caches.prefill.propagation import fastkv, prompt_distill
from decodax.caches.sparse.landmarks import LowRankKeys
from decodax.caches.sparse.offloaded import OffloadedRetrieval
from decodax.caches.sparse.recycling import Recycled
from decodax.caches.sparse.retrieval import KeyBounds, Retrieval
from decodax.caches.sparse.retrospective import Retrospection
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("fastkv",
                 "FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding Acceleration",
                 "Jo et al. 2025", "SnapKV's of what a layer has read: behind the middle one only a part of the prompt")
def _fastkv(budget: Budget = 0.1, passed: Budget = 0.2, layer: int | None = None, window: int = 8,
            kernel: int = 7) -> CacheConfig:
    return fastkv(budget, passed, layer, window, kernel, "fastkv")


@CACHES.register("promptdistill", "PromptDistill: Query-based Selective Token Retention in Intermediate Layers for "
                 "Efficient Large Language Model Inference", "Jin et al. 2025",
                 "the tokens that the newest query of one layer looks for; the layers behind read no others")
def _promptdistill(budget: int = 1024, layer: int | None = None, kernel: int = 5) -> CacheConfig:
    if not isinstance(budget, int):
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens")
    return prompt_distill(budget, layer, kernel, "promptdistill")


@CACHES.register("quest", "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", "Tang et al. 2024",
                 "everything; each query reads the pages whose keys may attract it, and the latest tokens")
def _quest(budget: int = 1024, page: int = 16, recent: int = 64, skip: tuple[int, ...] = (0, 1), offload: bool = False
           ) -> CacheConfig:
    return (OffloadedRetrieval if offload else Retrieval)(KeyBounds(), budget, page, recent, skip, "quest")


@CACHES.register("retro-attention", "Retrospective Sparse Attention for Efficient Long-Context Generation",
                 "Choi et al. 2025", "everything; each query reads the pages whose keys may attract it, and the "
                 "tokens before it read them, too, so that what they have become is computed anew")
def _retro_attention(budget: int = 1024, window: int = 2, page: int = 16, recent: int = 64,
                     skip: tuple[int, ...] = (0, 1)) -> CacheConfig:
    return Retrospection(KeyBounds(), budget, page, recent, skip, "retro-attention", window)


@CACHES.register("shadowkv", "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
                 "Sun et al. 2024", "keys of low rank; each query reads the chunks whose mean keys it attends to")
def _shadowkv(budget: int = 2048, chunk: int = 8, rank: int = 160, outliers: int = 48, local: int = 4,
              offload: bool = False) -> CacheConfig:
    return LowRankKeys(budget, chunk, rank, outliers, local, offload=offload)


@CACHES.register("recycled-attention", "Recycled Attention: Efficient inference for long-context language models",
                 "Xu et al. 2024",
                 "everything; each 50 tokens a query reads all of it, the others what that one attended to")
def _recycled(budget: int = 4096, stride: int = 50) -> CacheConfig:
    return Recycled(budget, stride)
