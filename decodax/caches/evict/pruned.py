"""A part of a prompt's tokens, in few bits: more tokens of lower precision for the same memory.

Which tokens stay is an eviction's choice; what stays of the prompt and the tokens that follow are written by a codec.
At equal bytes, four times as many tokens of 4 bits serve better than tokens of 16 ("More Tokens, Lower Precision:
Towards the Optimal Token-Precision Trade-off in KV Cache Compression", Zhang et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from decodax.cache import KVLayer, Wrapper
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.quantize.coded import Coded, Coding
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, PyTree, ReadPrompt


@dataclasses.dataclass(frozen=True)
class Pruned(CacheConfig):
    """A `Coded` cache of what an eviction keeps of the prompt, and of all that follows.

    Attributes:
        eviction: chooses once, the same number of tokens for all heads and layers. coding: how tokens are written.
    """

    eviction: Eviction
    coding: Coding

    def __post_init__(self) -> None:
        one = self.eviction
        if one.every is not None or one.skip or isinstance(one.budget, tuple) or not one.selection.uniform:
            raise ValueError(f"eviction: got {one.name}, takes one that chooses once, as many tokens in every head and "
                             "layer")
        if self.coding.codec.places:
            raise ValueError(f"coding: got {self.coding.name}, takes a codec that does not ask where tokens stand")

    def fit(self, new: int) -> Pruned:
        return dataclasses.replace(self, eviction=self.eviction.fit(new))

    def beyond(self, longest: int) -> int:
        return self.eviction.beyond(longest)

    def of_model(self, lm: Any) -> Pruned:
        return dataclasses.replace(self, eviction=self.eviction.of_model(lm))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        if any(shape.sliding is not None for shape in shapes):
            raise ValueError("cache: takes a model without sliding windows, whose layers would keep other tokens")
        kept = self.eviction.empty(shapes, batch, capacity, dtype, inputs)
        most = min([kv.shape[2] for kv in kept.kv] or [0])
        return PrunedCodes(base=self.coding.empty(shapes, batch, capacity, dtype, inputs, most), kind=self)


@struct
class PrunedCodes(Wrapper):
    """The codes, and how prompts are pruned."""

    base: Coded
    kind: Pruned = static()

    def for_prompt(self) -> Cache:      # type: ignore[override]
        if not self.base.rest:
            return self
        whole = self.kind.eviction.empty(self.base.shapes, self.base.length.shape[0], self.base.size,
                                         self.base.rest[0].dtype, self.base.given, whole=True)
        return PromptToPrune(base=whole, kind=self.kind)


@struct
class PromptToPrune(Wrapper):
    """A prompt that will be pruned."""

    base: Evicting
    kind: Pruned = static()

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kept = self.base.settled(prompt)
        into = self.kind.coding.empty(kept.shapes, kept.length.shape[0], kept.size, kept.kv[0].dtype, kept.given,
                                      kept.kv[0].shape[2])
        return PrunedCodes(base=into.filled(kept.kv, kept.length, kept.count[0][:, 0]), kind=self.kind)
