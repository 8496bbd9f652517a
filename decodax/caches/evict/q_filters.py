"""The score of Q-Filters ("Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", Godey et al., 2025).
It is not in the registry, since the filters are measured on each model: `Eviction(Top(Direction(filters)), 512)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.scores import HeldLayer, TokenScore


@dataclasses.dataclass(frozen=True)
class Direction(TokenScore):
    """Scores a token by minus the projection of its key onto the filter of the head, a direction in which keys get
    little attention.

    Attributes:
        filters: `[L][G][d]`, the filter of each layer and head.
    """

    filters: tuple[tuple[tuple[float, ...], ...], ...]

    def check(self, shapes: Sequence[KVLayer]) -> None:
        if len(self.filters) != len(shapes):
            raise ValueError(f"filters: got those of {len(self.filters)} layers, the model has {len(shapes)}")
        for layer, (own, shape) in enumerate(zip(self.filters, shapes, strict=True)):
            if np.shape(own) != (shape.heads, shape.width):
                raise ValueError(f"filters: got shape {np.shape(own)} for layer {layer}, takes "
                                 f"{(shape.heads, shape.width)}")

    def __call__(self, held: HeldLayer) -> Array:
        own = jnp.asarray(self.filters[held.layer], jnp.float32)
        return -jnp.einsum("gd,gsd->gs", own, held.keys)
