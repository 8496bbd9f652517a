"""QuantSpec: drafts with the target and the upper 4 of the 8 bits in its cache ("QuantSpec: Self-Speculative Decoding
with Hierarchical Quantized KV Cache", Tiwari et al., 2025). The output is that of plain decoding with the 8-bit
cache."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.own_cache import OwnCache
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.quantize.quantspec import QuantSpecCodec
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.io.quantize import quantize


@ALGORITHMS.register("quantspec", "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
                     "Tiwari et al. 2025", family="speculative-self", needs="a model", guarantee="approximate")
def quantspec(lm: Any, group: Count = 128, length: Count = 4, weights: str | None = "int4") -> Speculative:
    """Drafts with quantized weights and 4 bits of each cache entry; the verification uses all 8 bits.

    The output equals that of plain decoding with the 8-bit cache. For long prompts on one device.

    Args:
        lm: the target.
        group: number of tokens that share a scale.
        length: number of drafts in a round.
        weights: format of the weights for drafting; None: the target's own weights.
    """
    cache = QuantizedConfig(QuantSpecCodec(group), group, "quantspec")
    packed = None if weights is None else quantize(lm, weights)
    return Speculative(OwnCache(cache, True, packed), shape=Chain(length))
