"""Functions that adapt the cache of a model to the length of a request."""

from __future__ import annotations

from decodax.core.cache import CacheConfig
from decodax.core.types import Model


def fit_cache(model: Model, new: int) -> Model:
    """Returns the model with caches sized for at most `new` tokens after the prompt (`CacheConfig.with_length`);
    the same object if nothing changes."""
    kind = model.cache_kind
    if not isinstance(kind, CacheConfig) or (fitted := kind.with_length(new)) == kind:
        return model
    return model.with_cache(fitted)


def read_beyond(model: Model, longest: int) -> int:
    """Returns the number of extra positions on which the model is run after a prompt of `longest` tokens
    (`CacheConfig.beyond`)."""
    return kind.beyond(longest) if isinstance(kind := model.cache_kind, CacheConfig) else 0
