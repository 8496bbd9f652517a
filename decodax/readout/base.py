"""What wrappers of a model have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

from jax import Array

from decodax.cache import Cache
from decodax.core.types import CacheKind, Model


@dataclasses.dataclass(frozen=True)
class Readout(Model):
    """`base`, its hidden states read in another way. Cache and weights are its own."""

    base: Model

    @property
    def max_positions(self) -> int | None:
        return self.base.max_positions

    @property
    def trained_positions(self) -> int | None:
        return self.base.trained_positions

    def over(self, base: Model) -> Self:
        """The same on another network."""
        return dataclasses.replace(self, base=base)

    def with_cache(self, kind: CacheKind) -> Self:
        return self.over(self.base.with_cache(kind))

    def wrap_cache(self, wrap: Callable[[CacheKind], CacheKind]) -> Self:
        return self.over(self.base.wrap_cache(wrap))

    def fit(self, new: int) -> Self:
        fitted = self.base.fit(new)
        return self if fitted is self.base else self.over(fitted)

    def beyond(self, longest: int) -> int:
        return self.base.beyond(longest)

    def share(self, prefix: int, more: int) -> tuple[Model, Model] | None:
        pair = self.base.share(prefix, more)
        return None if pair is None else (self.over(pair[0]), self.over(pair[1]))

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        return self.base.init_cache(batch, capacity, params=params, inputs=inputs)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return self.base.embeddings(params, tokens)

    def outputs(self, params: Any, layer: int) -> Array:
        return self.base.outputs(params, layer)
