"""A ring with the latest tokens, for models whose layers all have a sliding window."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVConfig, KVLayer
from decodax.cache.slotted import Slotted, empty_slots
from decodax.common.struct import struct
from decodax.core.cache import Cache, Feature, PyTree
from decodax.core.capabilities import Truncates


@struct
class LatestTokens(Slotted, Truncates):
    """Keys and values of the latest tokens, as many as there are slots; those of earlier tokens are overwritten.

    After `truncate`, the slots of dropped tokens are empty until new tokens fill them; the older tokens that were
    overwritten are lost.
    """

    supports: ClassVar[frozenset[Feature]] = frozenset({"trees", "truncation"})

    def place(self, layer: int, entry: PyTree, positions: Array) -> Array:
        slots = self.positions[layer].shape[2]
        newest = jnp.maximum(positions.max(1), self.length - 1)[:, None]
        return jnp.where(positions > newest - slots, positions % slots, -1)[:, None]

    def truncate(self, length: Array) -> LatestTokens:
        held = tuple(jnp.where(at < length[:, None, None], at, -1) for at in self.positions)
        return self.replace(positions=held, length=jnp.minimum(self.length, length))


@dataclasses.dataclass(frozen=True)
class Latest(KVConfig):
    """Configuration of a cache of the latest tokens, exact for a model whose layers all have sliding windows of at most
    `tokens`.

    Attributes:
        tokens: number of tokens that are kept, in any case no more than a text can have.
    """

    tokens: int

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        return LatestTokens(**empty_slots(shapes, batch, size, dtype, inputs, slots=min(self.tokens, size)))


__all__ = ["Latest", "LatestTokens"]
