"""A part of a prompt's tokens, in few bits: more tokens of lower precision in the same memory ("More Tokens, Lower
Precision: Towards the Optimal Token-Precision Trade-off in KV Cache Compression", Zhang et al., 2024).

An eviction chooses which tokens stay; a codec writes these and the tokens that follow. At equal bytes, four times as
many tokens of 4 bits serve better than tokens of 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from decodax.cache import KVLayer, Wrapper
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.selection import Budget, Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.quantize.kivi import KIVICodec
from decodax.caches.quantize.quantized import QuantizedCache, QuantizedConfig
from decodax.common.options import Count
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, PyTree
from decodax.core.capabilities import ReadPrompt


@dataclasses.dataclass(frozen=True)
class QuantizedPruningConfig(CacheConfig):
    """Configuration of a cache that evicts from the prompt, and quantizes what stays and all tokens that follow.

    Attributes:
        eviction: evicts once, the same number of tokens in all heads and layers. coding: how tokens are quantized.
    """

    eviction: Eviction
    coding: QuantizedConfig

    def __post_init__(self) -> None:
        one = self.eviction
        if one.every is not None or one.skip or isinstance(one.budget, tuple) or not one.selection.uniform:
            raise ValueError(f"eviction: got {one.name}, takes one that chooses once, as many tokens in every head and "
                             "layer")
        if self.coding.codec.needs_positions:
            raise ValueError(f"coding: got {self.coding.name}, takes a codec that does not ask where tokens stand")

    def fit(self, new: int) -> QuantizedPruningConfig:
        return dataclasses.replace(self, eviction=self.eviction.fit(new))

    def beyond(self, longest: int) -> int:
        return self.eviction.beyond(longest)

    def of_model(self, lm: Any) -> QuantizedPruningConfig:
        return dataclasses.replace(self, eviction=self.eviction.of_model(lm))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        if any(shape.sliding is not None for shape in shapes):
            raise ValueError("cache: takes a model without sliding windows, whose layers would keep other tokens")
        kept = self.eviction.empty(shapes, batch, capacity, dtype, inputs)
        most = min([kv.shape[2] for kv in kept.kv] or [0])
        return QuantizedPruningCache(base=self.coding.empty(shapes, batch, capacity, dtype, inputs, most), kind=self)


@struct
class QuantizedPruningCache(Wrapper):
    """The quantized tokens, and the configuration that prompts are pruned by."""

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
    """A whole prompt, which is pruned and quantized when it has been read."""

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
                      kernel_size: Count = 5) -> QuantizedPruningConfig:
    """Keeps SnapKV's choice of the prompt and all tokens that follow, in few bits.

    Evicts once, after the prompt. Four bits and four times the budget take the bytes of 16 bits.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text.
        bits: of each number.
        group_size: numbers that share a scale.
        residual_length: largest number of latest tokens that stay whole, a multiple of `group_size`.
        window_size, kernel_size: of the score, as in `snapkv`.
    """
    if isinstance(budget, str):
        raise ValueError(f"budget: got {budget!r}, takes a number of tokens, or a share of the text between 0 and 1")
    kept = Eviction(Top(WindowAttention(window_size, kernel_size)), budget, name="quantized-pruning")
    coding = QuantizedConfig(KIVICodec(bits, bits, group_size), residual_length, "quantized-pruning")
    return QuantizedPruningConfig(kept, coding)
