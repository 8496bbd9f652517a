"""MagicDec: drafts with the target and the cache of a part of the prompt ("MagicDec: Breaking the Latency-Throughput
Tradeoff for Long Context Generation with Speculative Decoding", Sadhukhan et al., 2024)."""

from __future__ import annotations

from typing import Literal

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.own_cache import OwnCache
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.caches.evict.sink_window import sink_window
from decodax.caches.evict.snapkv import snapkv
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("magicdec", "MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with "
                     "Speculative Decoding", "Sadhukhan et al. 2024", family="speculative-self", guarantee="seed-exact")
def magicdec(budget: Count = 512, keep: Literal["snapkv", "sink-window"] = "snapkv",
             length: Count = 4) -> Speculative:
    """Drafts with the target, which attends only to prompt tokens that SnapKV, or sinks and a window, keep.

    For long prompts and large batches, for which reading the cache takes most of the time.

    Args:
        budget: number of prompt tokens to which drafts attend.
        keep: the policy that chooses them.
        length: number of drafts in a round.
    """
    if keep not in ("snapkv", "sink-window"):
        raise ValueError(f"keep: got {keep!r}, takes one of snapkv, sink-window")
    cache = (snapkv(budget, window_size=min(32, max(budget // 4, 1))) if keep == "snapkv" else
             sink_window(budget, every=None))
    return Speculative(OwnCache(cache), shape=Chain(length))
