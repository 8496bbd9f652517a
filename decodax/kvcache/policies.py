"""Published policies of eviction, each as what its paper puts together.

`budget` is what each head of a layer keeps of a prompt, in tokens or (below 1) as a share of it. `every`: the rule runs
again each so many tokens while decoding, so that memory stays bounded; None: the tokens behind the prompt all stay.
"""

from __future__ import annotations

from typing import Literal

from decodax.cache.base import Kind
from decodax.kvcache.evicting import Eviction
from decodax.kvcache.quantized import KIVI
from decodax.kvcache.scores import (
    Accumulated,
    Capacity,
    Critical,
    ExpectedAttention,
    KeyDifference,
    KeyNorm,
    LagRelative,
    Leverage,
    Position,
    WindowAttention,
)
from decodax.kvcache.selection import AdaptiveHeads, Budget, Chunks, Pyramid, Top, TwoStages
from decodax.kvcache.sinks import Sinks
from decodax.kvcache.table import policy

Every = int | None


@policy("knorm", "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", "Devoto et al. 2024",
        "the tokens whose keys have the smallest norms")
def _knorm(budget: Budget = 0.5, every: Every = None, skip: tuple[int, ...] = (0, 1)) -> Kind:
    return Eviction(Top(KeyNorm()), budget, every, skip, name="knorm")


@policy("snapkv", "SnapKV: LLM Knows What You are Looking for Before Generation", "Li et al. 2024",
        "the tokens that the latest queries attend to, and their neighbours")
def _snapkv(budget: Budget = 2048, every: Every = None, window: int = 32, kernel: int = 5,
            pool: Literal["mean", "max"] = "mean") -> Kind:
    return Eviction(Top(WindowAttention(window, kernel, pool)), budget, every, name="snapkv")


@policy("tova", "Transformers are Multi-State RNNs", "Oren et al. 2024",
        "the tokens that the newest query attends to, the same ones in all heads of a layer")
def _tova(budget: Budget = 512, every: Every = 1) -> Kind:
    return Eviction(Top(WindowAttention(1, 1, over="heads")), budget, every, name="tova")


@policy("h2o", "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        "Zhang et al. 2023", "the tokens that have received the most attention, and the latest ones")
def _h2o(budget: Budget = 1024, recent: int | None = None, every: Every = 32) -> Kind:
    half = budget // 2 if isinstance(budget, int) else 0
    return Eviction(Top(Accumulated(half if recent is None else recent, every=every)), budget, every, name="h2o")


@policy("observed-attention", "Observed attention", "kvpress 2024",
        "the tokens that have received the most attention on the average of the queries that could see them")
def _observed(budget: Budget = 0.5, every: Every = None) -> Kind:
    return Eviction(Top(Accumulated(mean=True, every=every)), budget, every, name="observed-attention")


@policy("sink-window", "Efficient Streaming Language Models with Attention Sinks", "Xiao et al. 2023",
        "the first tokens and the latest ones, at their own positions; kvpress calls it StreamingLLM")
def _sink_window(budget: Budget = 516, sinks: int = 4, every: Every = 1) -> Kind:
    return Eviction(Top(Position(sinks)), budget, every, name="sink-window")


@policy("streaming-llm", "Efficient Streaming Language Models with Attention Sinks", "Xiao et al. 2023",
        "the first tokens and a ring of the latest, at positions counted in the cache; prompts too")
def _streaming(sinks: int = 4, recent: int = 512) -> Kind:
    return Sinks(sinks, recent)


@policy("lagkv", "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        "Liang et al. 2025", "in each lag the tokens whose channels lie furthest apart, by the ranges of the next lag")
def _lagkv(budget: Budget = 0.5, every: Every = None, sinks: int = 4, lag: int = 128) -> Kind:
    return Eviction(Top(LagRelative(sinks, lag)), budget, every, name="lagkv")


@policy("keydiff", "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
        "Resource-Constrained Environments", "Park et al. 2025",
        "the tokens whose keys differ most from the mean direction")
def _keydiff(budget: Budget = 2048, every: Every = 128) -> Kind:
    return Eviction(Top(KeyDifference()), budget, every, name="keydiff")


@policy("cur", "CurDKV: Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
        "Sengupta et al. 2025", "the tokens with the largest leverage of key and value among their neighbours")
def _cur(budget: Budget = 0.5, every: Every = None, sinks: int = 4,
         of: Literal["key", "value", "average", "product"] = "product", local: int = 16) -> Kind:
    return Eviction(Top(Leverage(sinks, of, local)), budget, every, name="cur")


@policy("expected-attention", "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
        "Distribution", "Devoto et al. 2025",
        "the tokens that future queries would attend to, were they as the past ones")
def _expected(budget: Budget = 0.5, every: Every = None, sinks: int = 4, future: int = 512, covariance: bool = True,
              norms: bool = True, epsilon: float = 0.0) -> Kind:
    return Eviction(Top(ExpectedAttention(sinks, future, covariance, norms, epsilon)), budget, every,
                    name="expected-attention")


@policy("pyramidkv", "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        "Cai et al. 2024", "SnapKV with more tokens for the first layers and fewer for the last")
def _pyramidkv(budget: Budget = 2048, every: Every = None, window: int = 8, kernel: int = 7,
               pool: Literal["mean", "max"] = "max", beta: int = 20) -> Kind:
    return Eviction(Pyramid(WindowAttention(window, kernel, pool), beta), budget, every, name="pyramidkv")


@policy("chunkkv", "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
        "Liu et al. 2025", "whole chunks of tokens by SnapKV's scores")
def _chunkkv(budget: Budget = 2048, every: Every = None, chunk: int = 10, window: int = 32, kernel: int = 5) -> Kind:
    return Eviction(Chunks(WindowAttention(window, kernel), chunk), budget, every, name="chunkkv")


@policy("adakv", "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
        "Feng et al. 2024", "SnapKV where the heads of a layer share their tokens")
def _adakv(budget: Budget = 1024, every: Every = None, window: int = 32, kernel: int = 7,
           pool: Literal["mean", "max"] = "max", floor: float = 0.2, most: float | None = 2.0) -> Kind:
    return Eviction(AdaptiveHeads(WindowAttention(window, kernel, pool), floor, most), budget, every, name="adakv")


@policy("adaptive-expected-attention", "Expected Attention: KV Cache Compression by Estimating Attention from Future "
        "Queries Distribution", "Devoto et al. 2025",
        "Expected Attention where the heads of a layer share their tokens")
def _adaptive_expected(budget: Budget = 0.5, every: Every = None, sinks: int = 4, future: int = 512,
                       epsilon: float = 0.01, floor: float = 0.2, most: float | None = 2.0) -> Kind:
    return Eviction(AdaptiveHeads(ExpectedAttention(sinks, future, epsilon=epsilon), floor, most), budget, every,
                    name="adaptive-expected-attention")


@policy("criticalkv", "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
        "Feng et al. 2025", "half by SnapKV, half by what the value changes in the output too; for prompts alone")
def _criticalkv(budget: Budget = 1024, window: int = 32, kernel: int = 7, pool: Literal["mean", "max"] = "max",
                first: float = 0.5, floor: float | None = None, most: float | None = 2.0) -> Kind:
    score = Critical(WindowAttention(window, kernel, pool))
    return Eviction(TwoStages(score, first, floor, most), budget, name="criticalkv")


@policy("capkv", "CapKV", "kvpress 2026",
        "the tokens whose values add most to what is kept, by how their keys lie to the mean query")
def _capkv(budget: Budget = 0.5, every: Every = None, sinks: int = 4, future: int = 512,
           sharpness: float = 5.0) -> Kind:
    return Eviction(Top(Capacity(sinks, future, sharpness)), budget, every, name="capkv")


@policy("kivi", "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "Liu et al. 2024",
        "everything, in 2 bits but for the latest tokens: keys by channel, values by token")
def _kivi(bits: int = 2, group: int = 32, residual: int = 128) -> Kind:
    return KIVI(bits, bits, group, residual)


@policy("kv-adaquant", "More for Keys, Less for Values: Adaptive KV Cache Quantization", "Hariri et al. 2025",
        "everything, keys in 4 bits and values in 2, but for the latest tokens")
def _kv_adaquant(key_bits: int = 4, value_bits: int = 2, group: int = 32, residual: int = 128) -> Kind:
    return KIVI(key_bits, value_bits, group, residual)
