"""The shapes of keys and values that a model passes to its cache."""

from __future__ import annotations

from typing import Any

import jax

from decodax.cache.dense import dense
from decodax.cache.key_values import KVLayer
from decodax.core.cache import Cache
from decodax.core.types import Model


def layers_of(model: Model) -> list[KVLayer]:
    """Returns the shapes of a model's layers that have keys and values.

    Raises:
        ValueError: the model has no such layers.
    """
    found: list[KVLayer] = []

    def kind(layers: Any, batch: int, capacity: int, dtype: Any, inputs: Any = None) -> Cache:
        found.extend(KVLayer(*layer) for layer in layers)
        return dense(layers, batch, capacity, dtype, inputs)

    jax.eval_shape(lambda: model.with_cache(kind).init_cache(1, 8))
    if not found:
        raise ValueError("lm: got a model without keys and values")
    return found
