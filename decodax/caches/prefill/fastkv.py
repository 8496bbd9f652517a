"""FastKV: deep layers read the tokens that a middle layer attends to ("FastKV: Decoupling of Context Reduction and KV
Cache Compression for Prefill-Decoding Acceleration", Jo et al., 2025).

The first layers read the whole prompt. After the TSP layer (token-selective propagation) only the tokens go on that its
latest queries attend to. Each layer then evicts from what it has read, as SnapKV does, apart for each head.
"""

from __future__ import annotations

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Budget
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.prefill.propagation import Decoupled, Propagation
from decodax.common.options import Count
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("fastkv",
                 "FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding Acceleration",
                 "Jo et al. 2025", family="prefill")
def fastkv(budget: Budget = 0.1, tsp_length: Budget = 0.2, layer: int | None = None, window_size: Count = 8,
           kernel_size: Count = 7) -> CacheConfig:
    """Keeps SnapKV's choice of the tokens that a layer has read: after a middle layer, of a part of the prompt.

    It saves memory, and the time of reading long prompts. It takes a `decodax.models.Transformer`. Example:
    `cache="fastkv:budget=512"`.

    Args:
        budget: what each head of a layer keeps of a prompt, in tokens, as a share (below 1), or in bytes ("64MB").
        tsp_length: number of tokens that go on after the TSP layer, or (below 1) their share of the prompt.
        layer: the TSP layer, the last one that reads the whole prompt, from 0; None: in the middle of the model.
        window_size: number of latest queries whose attention counts; their tokens are kept.
        kernel_size: number of neighbours over which scores are pooled; an odd number.
    """
    own = Eviction(Decoupled(WindowAttention(window_size, kernel_size), window_size), budget, name="fastkv")
    return Propagation(own, WindowAttention(window_size, kernel_size, over="heads"), tsp_length, layer, 0.5)
