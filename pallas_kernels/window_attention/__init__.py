"""Attention of a window to a cache and to itself."""

from decodax.pallas_kernels.window_attention.attention import (
    Bias,
    Implementation,
    merge,
    prefix_attention,
    quantized,
    slot_weights,
    window_attention,
    window_attention_lse,
)
from decodax.pallas_kernels.window_attention.reference import BLOCK

__all__ = [
    "BLOCK",
    "Bias",
    "Implementation",
    "merge",
    "prefix_attention",
    "quantized",
    "slot_weights",
    "window_attention",
    "window_attention_lse",
]
