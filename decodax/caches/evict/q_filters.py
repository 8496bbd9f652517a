"""The score of Q-Filters ("Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", Godey et al., 2025).
It is not in the registry, since the filters are measured on each model: `Eviction(Top(Direction(filters)), 512)`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.caches.evict.scores import HeldLayer, TokenScore


@dataclasses.dataclass(frozen=True)
class Direction(TokenScore):
    """Scores a token by minus the projection of its key onto the filter of the head, a direction in which keys get
    little attention.

    Attributes:
        filters: `[L][G][d]`, the filter of each layer and head.
    """

    filters: tuple[tuple[tuple[float, ...], ...], ...]

    def __call__(self, held: HeldLayer) -> Array:
        if len(self.filters) != held.depth:
            raise ValueError(f"filters: got those of {len(self.filters)} layers, the model has {held.depth}")
        own = jnp.asarray(self.filters[held.layer], jnp.float32)
        if own.shape != (held.keys.shape[0], held.keys.shape[2]):
            raise ValueError(f"filters: got shape {own.shape} for layer {held.layer}, takes "
                             f"{(held.keys.shape[0], held.keys.shape[2])}")
        return -jnp.einsum("gd,gsd->gs", own, held.keys)
