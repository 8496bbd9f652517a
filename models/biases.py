"""Biases of attention scores that depend only on the positions of query and key: ALiBi, chunks, a first position.

Each is a `FixedBias`: a value without arrays, which every cache that supports biases takes, with drafts, trees and
beams.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.axes import MODEL
from decodax.pallas_kernels.window_attention import Added, FixedBias


@dataclasses.dataclass(frozen=True)
class Alibi(FixedBias):
    """Attention with linear biases (Press et al., 2022): a head's scores fall in proportion to the distance of the key.

    Attributes:
        heads: number of query heads, which fixes each head's slope.
        scale: factor of the bias.
        rounded: slopes, key positions and products are rounded to bfloat16, as in Falcon's training. The bias then
            depends on the position of the key alone, since rounded distances would differ.
    """

    heads: int
    scale: float = 1.0
    rounded: bool = False

    def __call__(self, q: Array, positions: Array) -> Added:
        own = q.shape[1]
        slopes = jnp.asarray(_slopes(self.heads))
        if own < self.heads:        # a device of a mesh has the scores of some heads
            slopes = lax.dynamic_slice_in_dim(slopes, lax.axis_index(MODEL) * own, own)
        slopes = slopes[:, None, None]

        def added(k: Array, where: Array) -> Array:
            each = jnp.repeat(where, own // where.shape[1], 1) if where.shape[1] > 1 else where
            if not self.rounded:
                return self.scale * slopes * (each - positions)
            # An explicit rounding: the compiler may leave out a conversion to bfloat16 and back.
            near = lambda x: lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
            return self.scale * near(near(slopes) * near(each))

        return added


def _slopes(heads: int) -> np.ndarray:
    """Returns the slopes `f32[H]`: a geometric sequence, and for numbers that are no power of two every second one of
    the next power's.

    >>> _slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    sequence = lambda n: [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return np.array(sequence(power) + sequence(2 * power)[::2][:heads - power], np.float32)


@dataclasses.dataclass(frozen=True)
class SameChunk(FixedBias):
    """Attention in chunks (Llama 4): a query sees the keys of its own chunk of `size` positions only."""

    size: int

    def __call__(self, q: Array, positions: Array) -> Added:
        def added(k: Array, where: Array) -> Array:
            each = jnp.repeat(where, q.shape[1] // where.shape[1], 1) if where.shape[1] > 1 else where
            # Not minus infinity: all keys of a block may be in other chunks.
            return jnp.where(each // self.size == positions // self.size, 0.0, -1e30)

        return added


@dataclasses.dataclass(frozen=True)
class BeginsAt(FixedBias):
    """A bias of the attention scores that hides all keys before position `first`, except the query's own key. So a
    query before that position attends to itself alone."""

    first: int

    def __call__(self, q: Array, positions: Array) -> Added:
        def added(k: Array, where: Array) -> Array:
            each = jnp.repeat(where, q.shape[1] // where.shape[1], 1) if where.shape[1] > 1 else where
            return jnp.where((each >= self.first) | (each == positions), 0.0, -1e30)

        return added
