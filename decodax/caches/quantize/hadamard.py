"""The Walsh-Hadamard transform, which spreads channels of large values over all channels."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.hadamard import rotation


def hadamard(width: int) -> np.ndarray:
    """Returns the Walsh-Hadamard matrix `f32[width, width]` in Sylvester's order, for a power of two; it is orthonormal
    and its own inverse.

    >>> (hadamard(2) * 2 ** 0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    return rotation(width).astype(np.float32)


def transformed(x: Array, width: int) -> Array:
    """Transforms each group of `width` channels of `x`, `f[n, c]`. The transform is its own inverse."""
    return (x.reshape(len(x), -1, width) @ jnp.asarray(hadamard(width), x.dtype)).reshape(x.shape)
