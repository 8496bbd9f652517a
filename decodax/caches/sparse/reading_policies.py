"""Published ways to read a part of a cache that keeps everything, each as what its paper puts together; see
`decodax.caches.evict.policies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodax.caches.constant import measured
from decodax.caches.prefill.criticality import Critical
from decodax.caches.prefill.grouped import ByGroups
from decodax.caches.prefill.hyper import Hyper
from decodax.caches.prefill.sparse_prefill import VerticalSlash, read_sizes
from decodax.caches.sparse.attention_predictor import AttentionNet, Expectation
from decodax.caches.sparse.boundaries import AtBoundaries
from decodax.caches.sparse.clusters import KeyClusters
from decodax.caches.sparse.probing import ProbeQueries
from decodax.caches.sparse.query_aware import ByCodes, KeyBooks
from decodax.caches.sparse.token_butler import Butler, ByButler
from decodax.caches.sparse.verified import PartialVerification
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("attention-predictor", "AttentionPredictor: Temporal Patterns Matter for KV Cache Compression",
                 "Yang et al. 2025", "everything; each head of a query reads the blocks that a trained network "
                 "expects to be attended to next (fit_attention_predictor), the first tokens and the latest")
def _attention_predictor(net: AttentionNet | str | None = None, budget: int = 1024, sinks: int = 64, recent: int = 64,
                         every: int = 1, block: int = 16, history: int = 64, full: int | None = None,
                         skip: tuple[int, ...] = ()) -> CacheConfig:
    if isinstance(net, str):
        net = AttentionNet.load(net)
    if not isinstance(net, AttentionNet):
        raise ValueError(f"net: got {'none' if net is None else type(net).__name__}, takes what "
                         "decodax.train.attention_predictor trains, or a file of it")
    return Expectation(net, budget, sinks, recent, every, block, history, full, skip)


@CACHES.register("clusterkv", "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
                 "Liu et al. 2024", "everything; each query reads clusters of tokens whose keys are alike, and the "
                 "first tokens and the latest")
def _clusterkv(budget: int = 1024, per: int = 80, sinks: int = 16, every: int = 320, more: int = 8, loops: int = 20,
               seed: int = 0, skip: tuple[int, ...] = (0, 1)) -> CacheConfig:
    return KeyClusters(budget, per, sinks, every, more, loops, seed, skip)


@CACHES.register("louiskv", "LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences", "Wu et al. 2025",
                 "everything; where a query is unlike the one before, heads choose clusters of the prompt and "
                 "segments of the answer, which are read until the next such place")
def _louiskv(budget: int = 1024, tau: float = 0.7, per: int = 16, sinks: int = 4, buffer: int = 64, loops: int = 10,
             seed: int = 0, cut: bool = True, skip: tuple[int, ...] = ()) -> CacheConfig:
    return AtBoundaries(budget, tau, per, sinks, buffer, loops, seed, cut, skip)


@CACHES.register("critiprefill",
                 "CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs",
                 "Lv et al. 2024",
                 "everything; a segment of a prompt attends to the blocks before it that are critical to it")
def _critiprefill(budget: int = 2048, segment: int = 512, block: int = 32, dense: int = 4096, memory: float = 0.25,
                  skip: int = 1) -> CacheConfig:
    return Critical(budget, segment, block, dense, memory, skip)


@CACHES.register("minference",
                 "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention",
                 "Jiang et al. 2024", "everything; each head of a segment of a prompt attends to the columns and the "
                 "diagonals that its last queries look at")
def _minference(vertical: int = 1000, slash: int = 6096, heads: str | Sequence[Mapping[Any, Sequence[Any]]] = (),
                segment: int = 32768, last: int = 64, first: int = 30, near: int = 100, block: int = 64,
                threshold: int = 32768) -> CacheConfig:
    return VerticalSlash(vertical, slash, read_sizes(heads), segment, last, first, near, block, threshold)


@CACHES.register("hyper-attention", "HyperAttention: Long-context Attention in Near-Linear Time", "Han et al. 2023",
                 "everything; of far tokens of a prompt those with similar hashes are read, and a sample of the others")
def _hyper_attention(block: int = 256, samples: int = 256, min_seq_len: int = 4096, projections: int = 7, skip: int = 0,
                     seed: int = 0) -> CacheConfig:
    return Hyper(block, samples, min_seq_len, projections, skip, seed)


@CACHES.register("specpv",
                 "SpecPV: Improving Self-Speculative Decoding for Long-Context Generation via Partial Verification",
                 "Tan et al. 2025", "everything; drafts are verified on chosen blocks, and behind each 20 tokens what "
                 "was verified so is computed anew from everything")
def _specpv(budget: int = 4096, sinks: int = 2, window: int = 8, block: int = 16, buffer: int = 20) -> CacheConfig:
    return PartialVerification(budget, sinks, window, block, buffer)


@CACHES.register("quick-prefill", "QuickVideo: Real-Time Long Video Understanding with System Algorithm Co-Design",
                 "Schneider et al. 2025", "of each group of a prompt the tokens whose keys have the smallest norms; "
                 "its latest tokens, and what follows it")
def _quick_prefill(keep: float = 0.2, group: int = 1024, recent: int = 64) -> CacheConfig:
    return ByGroups(keep, group, recent)


@CACHES.register("token-butler", "TokenButler: Token Importance Is Predictable", "Akhauri et al. 2025",
                 "everything; each head of a query reads the tokens that a trained predictor holds important for it "
                 "(fit_token_butler)")
def _token_butler(butler: Butler | str | None = None, budget: int | float = 0.5, sinks: int = 4) -> CacheConfig:
    if isinstance(butler, str):
        butler = Butler.load(butler)
    if not isinstance(butler, Butler):
        raise ValueError(f"butler: got {'none' if butler is None else type(butler).__name__}, takes what "
                         "decodax.train.token_butler trains, or a file of it")
    return ByButler(butler, budget, sinks)


@CACHES.register("a2ats", "A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and "
                 "Query-Aware Vector Quantization", "He et al. 2025", "everything; each query reads the tokens whose "
                 "keys it finds by measured centroids (fit_key_books), the first tokens and the latest")
def _a2ats(books: KeyBooks | None = None, budget: int | float = 0.03, sinks: int = 8, recent: int = 64,
           distance: int = 2048, skip: tuple[int, ...] = ()) -> CacheConfig:
    return ByCodes(measured("books", books, KeyBooks, "fit_key_books"), budget, sinks, recent, distance, skip)


@CACHES.register("act-qkv",
                 "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs Inference",
                 "Xiao et al. 2025", "everything; a window of a prompt and each token behind it read the blocks that "
                 "a probe query chooses, the first tokens and the latest; layers divide blocks by information density")
def _act_qkv(budget: int = 2048, sinks: int = 64, recent: int = 512, block: int = 32, window: int = 256,
             representatives: int = 4, samples: int = 100, least: int = 32, room: int = 64) -> CacheConfig:
    return ProbeQueries(budget, sinks, recent, block, window, representatives, samples, least, room)
