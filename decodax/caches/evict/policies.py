"""Published caches that are no evictions, each as a function of its options. They move to the shelves of their own."""

from __future__ import annotations

from decodax.cache.paged import Paged
from decodax.cache.shared_prefix import Sharing
from decodax.caches.context.context import ContextAxis
from decodax.caches.context.ring import Mode, RingChoice
from decodax.caches.evict.selection import Budget
from decodax.caches.prefill.propagation import fastkv, prompt_distill
from decodax.caches.quantize.codecs import Affine, Approximated, Largest
from decodax.caches.quantize.coded import Coding
from decodax.caches.quantize.merging import Merging
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


@CACHES.register("minicache", "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
                 "Liu et al. 2024", "everything, where pairs of deep layers share the directions of a prompt's tokens")
def _minicache(start: int | None = None, towards: float = 0.6, retained: float = 0.05) -> CacheConfig:
    return Merging(start, towards, retained)


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


@CACHES.register("paged", "Efficient Memory Management for Large Language Model Serving with PagedAttention",
                 "Kwon et al. 2023", "everything, in pages of a pool that all rows share; samples share full pages",
                 guarantee="exact")
def _paged(pages: int = 2048, page: int = 16) -> CacheConfig:
    return Paged(pages, page)


@CACHES.register("hydragen", "Hydragen: High-Throughput LLM Inference with Shared Prefixes", "Juravsky et al. 2024",
                 "everything, and what rows have in common once: a prompt's samples, or the same beginning",
                 guarantee="exact")
def _hydragen() -> CacheConfig:
    return Sharing()


@CACHES.register("context-parallel", "Context Parallelism for Scalable Million-Token Inference", "Yang et al. 2024",
                 "everything, its positions divided over a mesh axis; prompts by ring attention", guarantee="exact")
def _context_parallel(mode: Mode = "auto", block: int = 256, flops: float = RingChoice.flops,
                      bandwidth: float = RingChoice.bandwidth) -> CacheConfig:
    return ContextAxis(RingChoice(mode, flops, bandwidth), block)


@CACHES.register("kivi", "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "Liu et al. 2024",
                 "everything, in 2 bits but for the latest tokens: keys by channel, values by token")
def _kivi(bits: int = 2, group: int = 32, residual: int = 128) -> CacheConfig:
    return Coding(Affine(bits, bits, group), residual, "kivi")


@CACHES.register("kv-adaquant", "More for Keys, Less for Values: Adaptive KV Cache Quantization", "Hariri et al. 2025",
                 "everything, in KIVI's form with more bits for keys than for values: 4 and 2, but for the latest "
                 "tokens")
def _kv_adaquant(key_bits: int = 4, value_bits: int = 2, group: int = 32, residual: int = 128) -> CacheConfig:
    return Coding(Affine(key_bits, value_bits, group), residual, "kv-adaquant")


@CACHES.register("gear", "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
                 "Kang et al. 2024",
                 "everything, in 4 bits, with outliers apart and a low-rank matrix of what is left over")
def _gear(bits: int = 4, group: int = 64, buffer: int = 64, outliers: float = 0.02, rank: int = 4,
          loops: int = 3) -> CacheConfig:
    return Coding(Approximated(bits, group, buffer, outliers, rank, loops), buffer, "gear")


@CACHES.register("mustafar", "Mustafar: Promoting Unstructured Sparsity for KV Cache Pruning in LLM Inference",
                 "Joo et al. 2025", "the largest numbers of each key and value, and the latest tokens whole")
def _mustafar(key_sparsity: float = 0.5, value_sparsity: float = 0.5, residual: int = 32) -> CacheConfig:
    return Coding(Largest(key_sparsity, value_sparsity), residual, "mustafar")
