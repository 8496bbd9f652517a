"""Matrix products with packed weights in plain XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def scaled(codes: Array, scales: Array) -> Array:
    """Returns codes `f[..., N, K]` times the scales `f32[..., N, groups]` of their groups, in the dtype of the
    codes."""
    groups = codes.reshape(*scales.shape, -1)
    return (groups * scales[..., None].astype(codes.dtype)).reshape(codes.shape)


def packed_matmul(x: Array, codes: Array, scales: Array, dtype: Any) -> Array:
    """Returns `x @ w.T`; see `packed_matmul` of the package. The weights are rounded to the dtype of `x`."""
    kernel = scaled(codes.astype(x.dtype), scales)
    return jnp.matmul(x, kernel.T, preferred_element_type=jnp.promote_types(x.dtype, dtype)).astype(dtype)
