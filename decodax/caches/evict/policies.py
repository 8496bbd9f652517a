"""Published caches that are no evictions, each as a function of its options. They move to the shelves of their own."""

from __future__ import annotations

from decodax.cache.paged import Paged
from decodax.cache.shared_prefix import Sharing
from decodax.caches.context.context import ContextAxis
from decodax.caches.context.ring import Mode, RingChoice
from decodax.caches.quantize.codecs import Affine, Approximated, Largest
from decodax.caches.quantize.coded import Coding
from decodax.caches.quantize.merging import Merging
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("minicache", "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
                 "Liu et al. 2024", "everything, where pairs of deep layers share the directions of a prompt's tokens")
def _minicache(start: int | None = None, towards: float = 0.6, retained: float = 0.05) -> CacheConfig:
    return Merging(start, towards, retained)


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
