"""Biases of attention: numbers that are added to its scores."""

from __future__ import annotations

import abc
from collections.abc import Callable

from jax import Array

from decodax.pallas_kernels.window_attention.pooled import PooledKeys
from decodax.pallas_kernels.window_attention.selection import KeyChoice

Added = Callable[[Array, Array], Array]
"""A function from keys `f[B, G, K, d]` and their positions `i32[B or 1, G or 1, 1, K]` (separate for each key/value
head if a cache keeps different tokens in each) to the numbers that are added to their scores, `f32[B or 1, H or 1, W,
K]`."""

Bias = Callable[[Array, Array], Added] | KeyChoice | PooledKeys
"""A choice of keys, or of pooled ones beside the latest; or a function from the queries `f[B, H, W, d]` of a window and
their positions `i32[B, 1, W, 1]` to an `Added`."""


class FixedBias(abc.ABC):
    """A `Bias` without arrays. Derive a frozen dataclass: it is compared by value, so the attention is traced once for
    all layers, and each device of a mesh adds the bias to the scores of its own heads."""

    @abc.abstractmethod
    def __call__(self, q: Array, positions: Array) -> Added: ...


def by_position(scores: Callable[[Array, Array], Array]) -> Bias:
    """Returns a bias that depends on positions only.

    Args:
        scores: maps positions of queries `i32[B, 1, W, 1]` and of keys `i32[B or 1, G or 1, 1, K]` to what is added to
            the scores, `f32[B or 1, H or 1, W, K]`.
    """
    return lambda q, positions: lambda k, where: scores(positions, where)
