"""QuantSpec: drafts with the target on 4 of 8 bits of its cache ("QuantSpec: Self-Speculative Decoding with
Hierarchical Quantized KV Cache", Tiwari et al., 2025). The output is plain decoding's on the cache of 8 bits."""

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
    """Drafts with quantized weights on 4 bits of a cache whose 8 bits the verification reads.

    The output equals plain decoding on the 8-bit cache. For long prompts on one device.

    Args:
        lm: the target. group: tokens that share a scale. length: drafts a round.
        weights: format of the weights that draft; None: the target's own weights.
    """
    cache = QuantizedConfig(QuantSpecCodec(group), group, "quantspec")
    packed = None if weights is None else quantize(lm, weights)
    return Speculative(OwnCache(lm, cache, True, packed), shape=Chain(length))
