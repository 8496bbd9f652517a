"""Rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of the first `width` entries of each head by angles `position * theta ** (-2 i / width)`.

    The two halves of those entries form the pairs (as in GPT-NeoX and Hugging Face's files, not interleaved).
    """

    width: int
    theta: float = 10_000.0

    def frequencies(self) -> tuple[np.ndarray, float]:
        """`f32[width / 2]` angles a position, and the factor of sine and cosine."""
        inverse = 1.0 / self.theta ** (np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width))
        return inverse.astype(np.float32), 1.0

    def table(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine `f32[B, W, 1, width / 2]` at `i32[B, W]` positions."""
        frequencies, factor = self.frequencies()
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first `2 * cos.shape[-1]` entries of `f[B, W, H, d]`; the rest passes."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return jnp.concatenate([(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype), rest], axis=-1)
