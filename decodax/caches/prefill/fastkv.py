"""FastKV: deep layers run on the tokens that a middle layer attends to ("FastKV: Decoupling of Context Reduction and KV
Cache Compression for Prefill-Decoding Acceleration", Jo et al., 2025).

The first layers run on the whole prompt. After the TSP layer (token-selective propagation), only the tokens are passed
on that its latest queries attend to. Each layer then evicts some of the tokens that it has run on, by SnapKV's rule,
for each head separately.

The kept tokens are those of the authors' code (b978769). The model has to be one of this library's transformers. A
drafter that reads hidden states gets those of the layer where the prompt is cut.
"""

from __future__ import annotations

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Budget
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.prefill.propagation import Decoupled, Propagation
from decodax.common.options import Count, Odd, Whole
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


@CACHES.register("fastkv",
                 "FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding Acceleration",
                 "Jo et al. 2025", family="prefill")
def fastkv(budget: Budget = 0.1, tsp_length: Budget = 0.2, layer: Whole | None = None, window_size: Count = 8,
           kernel_size: Odd = 7) -> CacheConfig:
    """Keeps the tokens that SnapKV chooses; layers after a middle one run on a part of the prompt only.

    It saves memory, and prefill time for long prompts. It needs a `decodax.models.Transformer`. Example:
    `cache="fastkv:budget=512"`.

    Args:
        budget: number of prompt tokens that each head keeps; below 1, a share of the prompt; or bytes such as "64MB".
        tsp_length: number of tokens that the TSP layer passes on; below 1, their share of the prompt.
        layer: the TSP layer, the last one that runs on the whole prompt, from 0; None: in the middle of the model.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size: number of neighbouring tokens whose scores are pooled, odd.
    """
    own = Eviction(Decoupled(WindowAttention(window_size, kernel_size), window_size), budget, name="fastkv")
    return Propagation(own, WindowAttention(window_size, kernel_size, over="heads"), tsp_length, layer, 0.5)
