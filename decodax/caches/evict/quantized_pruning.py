"""Evicts part of a prompt's tokens and quantizes the rest: more tokens of lower precision in the same memory ("More
Tokens, Lower Precision: Towards the Optimal Token-Precision Trade-off in KV Cache Compression", Zhang et al., 2024).

An eviction rule chooses the tokens of the prompt to keep; a codec quantizes these and all later tokens. For the same
number of bytes, tokens of 4 bits give better results than a fourth of that number at 16 bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from decodax.cache import KVLayer, Wrapper
from decodax.cache.key_values import KVConfig, Score
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.selection import Budget, Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.quantize.kivi import KIVICodec
from decodax.caches.quantize.quantized import QuantizedCache, QuantizedConfig
from decodax.common.options import Count, Odd
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, PyTree
from decodax.core.capabilities import ReadPrompt


@dataclasses.dataclass(frozen=True)
class QuantizedPruningConfig(KVConfig):
    """Configuration of a cache that evicts prompt tokens, and quantizes the kept ones and all later tokens.

    Attributes:
        eviction: the eviction rule. It must evict once, and keep the same number of tokens in all heads and layers.
        coding: configuration of the quantized cache.
    """

    eviction: Eviction
    coding: QuantizedConfig

    def __post_init__(self) -> None:
        one = self.eviction
        if one.every is not None or one.skip or isinstance(one.budget, tuple) or not one.selection.uniform:
            raise ValueError(f"eviction: got {one.name}, takes one that chooses once, as many tokens in every head and "
                             "layer")
        if self.coding.codec.needs_positions:
            raise ValueError(f"coding: got {self.coding.name}, takes a codec that does not ask for positions")

    def with_length(self, new: int) -> QuantizedPruningConfig:
        return dataclasses.replace(self, eviction=self.eviction.with_length(new))

    def beyond(self, longest: int) -> int:
        return self.eviction.beyond(longest)

    def of_model(self, lm: Any) -> QuantizedPruningConfig:
        return dataclasses.replace(self, eviction=self.eviction.of_model(lm))

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        own: frozenset[Score] = frozenset(("sliding windows", "biases"))
        return own | self.eviction.refuses(layer, shape)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        kept = self.eviction.empty(shapes, batch, size, dtype, inputs)
        most = min([kv.shape[2] for kv in kept.kv] or [0])
        return QuantizedPruningCache(base=self.coding.empty(shapes, batch, size, dtype, inputs, most), kind=self)


@struct
class QuantizedPruningCache(Wrapper):
    """The quantized cache while decoding, after eviction.

    Attributes:
        base: the quantized tokens.
        kind: static; the configuration.
    """

    base: QuantizedCache
    kind: QuantizedPruningConfig = static()

    def prefill_cache(self) -> Cache:      # type: ignore[override]
        if not self.base.rest:
            return self
        whole = self.kind.eviction.empty(self.base.shapes, self.base.length.shape[0], self.base.size,
                                         self.base.rest[0].dtype, self.base.given, whole=True)
        return PromptToPrune(base=whole, kind=self.kind)


@struct
class PromptToPrune(Wrapper):
    """The cache of a `QuantizedPruningConfig` during prefill, with all tokens of the prompt in `base`. `finish_prefill`
    evicts tokens and quantizes the rest."""

    base: Evicting
    kind: QuantizedPruningConfig = static()

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kept = self.base.finish_prefill(prompt)
        into = self.kind.coding.empty(kept.shapes, kept.length.shape[0], kept.size, kept.kv[0].dtype, kept.given,
                                      kept.kv[0].shape[2])
        return QuantizedPruningCache(base=into.filled(kept.kv, kept.length, kept.count[0][:, 0]), kind=self.kind)


@CACHES.register("quantized-pruning",
                 "More Tokens, Lower Precision: Towards the Optimal Token-Precision Trade-off in KV Cache Compression",
                 "Zhang et al. 2024", family="evict")
def quantized_pruning(budget: Budget = 2048, bits: Literal[2, 4, 8] = 4, group_size: Count = 32,
                      residual_length: Count = 128, window_size: Count = 32,
                      kernel_size: Odd = 5) -> QuantizedPruningConfig:
    """Keeps the prompt tokens that SnapKV chooses and all later tokens, quantized.

    Evicts once, after the prompt. Four bits and four times the budget take as many bytes as 16 bits.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text.
        bits: number of bits of each number.
        group_size: number of values that share a scale.
        residual_length: maximum number of latest tokens that are not quantized, a multiple of `group_size`.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size: number of neighbouring tokens whose scores are pooled, odd.
    """
    if isinstance(budget, str):
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens, or a share of the text between 0 and 1")
    kept = Eviction(Top(WindowAttention(window_size, kernel_size)), budget, name="quantized-pruning")
    coding = QuantizedConfig(KIVICodec(bits, bits, group_size), residual_length, "quantized-pruning")
    return QuantizedPruningConfig(kept, coding)
