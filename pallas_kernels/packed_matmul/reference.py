"""Matrix products with packed weights in plain XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def scaled(codes: Array, scales: Array) -> Array:
    """Returns the weights that codes stand for, `f[..., N, K]`: `codes`, `f[..., N, K]`, times the scale of their group
    of `K // groups` consecutive inputs, `scales`, `f32[..., N, groups]`; in the dtype of the codes."""
    groups = codes.reshape(*scales.shape, -1)
    return (groups * scales[..., None].astype(codes.dtype)).reshape(codes.shape)


def packed_matmul(x: Array, codes: Array, scales: Array, dtype: Any) -> Array:
    """Returns `x @ w.T`, `f[R, N]` in `dtype`, by plain XLA operations. The weights `w`, `codes` (integers `[N, K]`)
    times the scale (`f32[N, groups]`) of their group of consecutive inputs, are rounded to the dtype of `x`, `f[R, K]`.
    """
    kernel = scaled(codes.astype(x.dtype), scales)
    return jnp.matmul(x, kernel.T, preferred_element_type=jnp.promote_types(x.dtype, dtype)).astype(dtype)
