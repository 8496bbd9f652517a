"""Published policies of eviction, each as what its paper puts together.

`budget` is what each head of a layer keeps of a prompt, in tokens or (below 1) as a share of it. `every`: the rule runs
again each so many tokens while decoding, so that memory stays bounded; None: the tokens behind the prompt all stay.
"""

from __future__ import annotations

from typing import Literal

from decodax.cache.paged import Paged
from decodax.cache.shared_prefix import Sharing
from decodax.caches.bounded.sinks import Sinks
from decodax.caches.context.context import ContextAxis
from decodax.caches.context.ring import Mode, RingChoice
from decodax.caches.evict.crush import Anchor, Representatives
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.graph import Decayed
from decodax.caches.evict.key_scores import KeyDifference, KeyNorm, LagRelative, Leverage, SinksAndRecent
from decodax.caches.evict.lookahead import QueriesAhead
from decodax.caches.evict.pools import DecodePool, HeadSizes, head_sizes
from decodax.caches.evict.pruned import Pruned
from decodax.caches.evict.query_scores import Accumulated, Capacity, Critical, ExpectedAttention, WindowAttention
from decodax.caches.evict.reconstruction import Reconstruction, Words
from decodax.caches.evict.selection import (
    AcrossLayers,
    AdaptiveHeads,
    Budget,
    Chunks,
    LatestHalf,
    NearestTop,
    Pyramid,
    Top,
    TwoStages,
)
from decodax.caches.quantize.codecs import Affine, Approximated, Largest
from decodax.caches.quantize.coded import Coding
from decodax.caches.quantize.merging import Merging
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig

Every = int | None


@CACHES.register("knorm", "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
                 "Devoto et al. 2024", "the tokens whose keys have the smallest norms")
def _knorm(budget: Budget = 0.5, every: Every = None, skip: tuple[int, ...] = (0, 1)) -> CacheConfig:
    return Eviction(Top(KeyNorm()), budget, every, skip, name="knorm")


@CACHES.register("snapkv", "SnapKV: LLM Knows What You are Looking for Before Generation", "Li et al. 2024",
                 "the tokens that the latest queries attend to, and their neighbours")
def _snapkv(budget: Budget = 2048, every: Every = None, window: int = 32, kernel: int = 5,
            pool: Literal["mean", "max"] = "mean") -> CacheConfig:
    return Eviction(Top(WindowAttention(window, kernel, pool)), budget, every, name="snapkv")


@CACHES.register("tova", "Transformers are Multi-State RNNs", "Oren et al. 2024",
                 "the tokens that the newest query attends to, the same ones in all heads of a layer")
def _tova(budget: Budget = 512, every: Every = 1) -> CacheConfig:
    return Eviction(Top(WindowAttention(1, 1, over="heads")), budget, every, name="tova")


@CACHES.register("h2o", "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
                 "Zhang et al. 2023", "the tokens that have received the most attention, and the latest ones")
def _h2o(budget: Budget = 1024, recent: int | None = None, every: Every = 32) -> CacheConfig:
    kept = LatestHalf(Accumulated(every=every)) if recent is None else Top(Accumulated(recent, every=every))
    return Eviction(kept, budget, every, name="h2o")


@CACHES.register("observed-attention", "Observed attention", "kvpress 2024",
                 "the tokens that have received the most attention on the average of the queries that could see them")
def _observed(budget: Budget = 0.5, every: Every = None) -> CacheConfig:
    return Eviction(Top(Accumulated(mean=True, every=every)), budget, every, name="observed-attention")


@CACHES.register("sink-window", "Efficient Streaming Language Models with Attention Sinks", "Xiao et al. 2023",
                 "the first tokens and the latest ones, at their own positions; kvpress calls it StreamingLLM")
def _sink_window(budget: Budget = 516, sinks: int = 4, every: Every = 1) -> CacheConfig:
    return Eviction(Top(SinksAndRecent(sinks)), budget, every, name="sink-window")


@CACHES.register("streaming-llm", "Efficient Streaming Language Models with Attention Sinks", "Xiao et al. 2023",
                 "the first tokens and a ring of the latest, at positions counted in the cache; prompts too")
def _streaming(sinks: int = 4, recent: int = 512) -> CacheConfig:
    return Sinks(sinks, recent)


@CACHES.register("lagkv", "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
                 "Liang et al. 2025",
                 "in each lag the tokens whose channels lie furthest apart, by the next lag's ranges")
def _lagkv(budget: Budget = 0.5, every: Every = None, sinks: int = 4, lag: int = 128) -> CacheConfig:
    return Eviction(Top(LagRelative(sinks, lag)), budget, every, name="lagkv")


@CACHES.register("keydiff", "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
                 "Resource-Constrained Environments", "Park et al. 2025",
                 "the tokens whose keys differ most from the mean direction")
def _keydiff(budget: Budget = 2048, every: Every = 128) -> CacheConfig:
    return Eviction(Top(KeyDifference()), budget, every, name="keydiff")


@CACHES.register("cur", "CurDKV: Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
                 "Sengupta et al. 2025", "the tokens with the largest leverage of key and value among their neighbours")
def _cur(budget: Budget = 0.5, every: Every = None, sinks: int = 4,
         of: Literal["key", "value", "average", "product"] = "product", local: int = 16) -> CacheConfig:
    return Eviction(Top(Leverage(sinks, of, local)), budget, every, name="cur")


@CACHES.register("expected-attention",
                 "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
                 "Devoto et al. 2025", "the tokens that future queries would attend to, were they as the past ones")
def _expected(budget: Budget = 0.5, every: Every = None, sinks: int = 4, future: int = 512, covariance: bool = True,
              norms: bool = True, epsilon: float = 0.0) -> CacheConfig:
    return Eviction(Top(ExpectedAttention(sinks, future, covariance, norms, epsilon)), budget, every,
                    name="expected-attention")


@CACHES.register("pyramidkv", "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
                 "Cai et al. 2024", "SnapKV with more tokens for the first layers and fewer for the last")
def _pyramidkv(budget: Budget = 2048, every: Every = None, window: int = 8, kernel: int = 7,
               pool: Literal["mean", "max"] = "max", beta: int = 20) -> CacheConfig:
    return Eviction(Pyramid(WindowAttention(window, kernel, pool), beta), budget, every, name="pyramidkv")


@CACHES.register("chunkkv",
                 "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
                 "Liu et al. 2025", "whole chunks of tokens by SnapKV's scores")
def _chunkkv(budget: Budget = 2048, every: Every = None, chunk: int = 10, window: int = 32,
             kernel: int = 5) -> CacheConfig:
    return Eviction(Chunks(WindowAttention(window, kernel), chunk), budget, every, name="chunkkv")


@CACHES.register("graphkv", "GraphKV: Breaking the Static Selection Paradigm with Graph-Based KV Cache Eviction",
                 "Li et al. 2025", "SnapKV where tokens whose keys are like those of better ones give way")
def _graphkv(budget: Budget = 512, every: Every = None, sources: float = 0.3, neighbours: int = 4, rounds: int = 1,
             window: int = 32, kernel: int = 5, pool: Literal["mean", "max"] = "mean") -> CacheConfig:
    score = WindowAttention(window, kernel, pool)
    return Eviction(Decayed(score, sources, neighbours, rounds), budget, every, name="graphkv")


@CACHES.register("adakv",
                 "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
                 "Feng et al. 2024", "SnapKV where the heads of a layer share their tokens")
def _adakv(budget: Budget = 1024, every: Every = None, window: int = 32, kernel: int = 7,
           pool: Literal["mean", "max"] = "max", floor: float = 0.2, most: float | None = None) -> CacheConfig:
    return Eviction(AdaptiveHeads(WindowAttention(window, kernel, pool), floor, most), budget, every, name="adakv")


@CACHES.register("adaptive-expected-attention",
                 "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
                 "Devoto et al. 2025", "Expected Attention where the heads of a layer share their tokens")
def _adaptive_expected(budget: Budget = 0.5, every: Every = None, sinks: int = 4, future: int = 512,
                       epsilon: float = 0.01, floor: float = 0.2, most: float | None = None) -> CacheConfig:
    return Eviction(AdaptiveHeads(ExpectedAttention(sinks, future, epsilon=epsilon), floor, most), budget, every,
                    name="adaptive-expected-attention")


@CACHES.register("criticalkv", "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
                 "Feng et al. 2025",
                 "half by SnapKV, half by what the value changes in the output too; for prompts alone")
def _criticalkv(budget: Budget = 1024, window: int = 32, kernel: int = 7, pool: Literal["mean", "max"] = "max",
                first: float = 0.5, floor: float | None = None, most: float | None = None) -> CacheConfig:
    score = Critical(WindowAttention(window, kernel, pool))
    return Eviction(TwoStages(score, first, floor, most), budget, name="criticalkv")


@CACHES.register("kvcrush", "KVCrush: Key Value Cache Size-Reduction Using Similarity in Head-Behaviour",
                 "Jha et al. 2025",
                 "the blocks that have received the most attention, and representatives of the others by their bits")
def _kvcrush(budget: int = 1024, every: Every = 32, block: int = 32, crush: int = 8, sinks: int = 32,
             recent: int = 128, anchor: Anchor = "random", seed: int = 0) -> CacheConfig:
    select = Representatives(Accumulated(recent, every=every, sinks=sinks, over="heads"), block, crush, anchor, seed)
    if not isinstance(budget, int) or budget < select.least:
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens from {select.least}, which the first and "
                         f"the latest tokens and {crush} blocks take")
    return Eviction(select, budget, every, name="kvcrush")


@CACHES.register("scope", "SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation", "Wu et al. 2024",
                 "SnapKV's for the prompt, for good, and a pool of its own for the tokens that follow")
def _scope(budget: int = 2048, heavy: int = 768, recent: int = 256,
           scheme: Literal["slide", "adaptive", "discontinuous"] = "slide", delta: int = 15, window: int = 8,
           kernel: int = 7, pool: Literal["mean", "max"] = "max") -> CacheConfig:
    if scheme not in ("slide", "adaptive", "discontinuous"):
        raise ValueError(f"scheme: got {scheme!r}, takes slide, adaptive or discontinuous")
    select = DecodePool(WindowAttention(window, kernel, pool), heavy, recent,
                        "at once" if scheme == "slide" else "by steps", delta)
    return Eviction(select, budget, delta if scheme == "discontinuous" else 1, name="scope")


@CACHES.register("headkv", "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval "
                 "and Reasoning", "Fu et al. 2024",
                 "SnapKV with sizes for each head by a measured importance (fit_heads)")
def _headkv(heads: tuple[tuple[float, ...], ...] = (), budget: int = 512, beta: float = 1.5, temperature: float = 1.0,
            window: int = 8, kernel: int = 7, pool: Literal["mean", "max"] = "max") -> CacheConfig:
    if not isinstance(budget, int):
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens")
    if not heads:
        raise ValueError("heads: got none, takes the importance of each head of each layer, as "
                         "decodax.train.fit_heads measures it")
    sizes = head_sizes(heads, budget, window, beta, temperature)
    return Eviction(HeadSizes(WindowAttention(window, kernel, pool), sizes), budget, name="headkv")


@CACHES.register("prefixkv", "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for "
                 "Efficient Generation", "Wang et al. 2024",
                 "the tokens that have received the most attention, by a measured share of each layer (fit_layers)")
def _prefixkv(layers: tuple[float, ...] = (), sinks: int = 4) -> CacheConfig:
    if not layers:
        raise ValueError("layers: got none, takes the share of each layer, as decodax.train.fit_layers measures it")
    everything = 1 << 30        # tokens
    shares = tuple(x if x < 1 else everything for x in layers)
    return Eviction(NearestTop(Accumulated(1, sinks=sinks, over="heads")), shares, name="prefixkv")


@CACHES.register("capkv", "CapKV", "kvpress 2026",
                 "the tokens whose values add most to what is kept, by how their keys lie to the mean query")
def _capkv(budget: Budget = 0.5, every: Every = None, sinks: int = 4, future: int = 512,
           sharpness: float = 5.0) -> CacheConfig:
    return Eviction(Top(Capacity(sinks, future, sharpness)), budget, every, name="capkv")


@CACHES.register("kvzip", "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", "Kim et al. 2025",
                 "the tokens that the model attends to when it repeats the text; for prompts alone")
def _kvzip(budget: Budget = 0.5, chunk: int = 2048, sinks: int = 4, layers: Literal["together", "each"] = "together",
           most: float | None = 2.0, ask: Words = Reconstruction.ask, go_on: Words = Reconstruction.go_on,
           answer: Words | None = None) -> CacheConfig:
    if layers not in ("together", "each"):
        raise ValueError(f"layers: got {layers!r}, takes together or each")
    score = Reconstruction(chunk, sinks, ask, go_on, answer)
    return Eviction(AcrossLayers(score, most) if layers == "together" else AdaptiveHeads(score, 0.0, most), budget,
                    name="kvzip")


@CACHES.register("laq", "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query",
                 "Wang et al. 2025", "SnapKV with the queries of tokens that are decoded ahead; for prompts alone")
def _laq(budget: Budget = 512, tokens: int = 8, window: int = 8, kernel: int = 7, pool: Literal["mean", "max"] = "max",
         first: int = 32) -> CacheConfig:
    return Eviction(Top(QueriesAhead(tokens, window, WindowAttention(first, kernel, pool))), budget, name="laq")


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


@CACHES.register("quantized-pruning",
                 "More Tokens, Lower Precision: Towards the Optimal Token-Precision Trade-off in KV Cache Compression",
                 "Zhang et al. 2024", "SnapKV's choice of the prompt and all that follows, in few bits")
def _quantized_pruning(budget: Budget = 2048, bits: int = 4, group: int = 32, residual: int = 128, window: int = 32,
                       kernel: int = 5) -> CacheConfig:
    if isinstance(budget, str):
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens, or a share of the text between 0 and 1")
    kept = Eviction(Top(WindowAttention(window, kernel)), budget, name="quantized-pruning")
    return Pruned(kept, Coding(Affine(bits, bits, group), residual, "quantized-pruning"))


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
