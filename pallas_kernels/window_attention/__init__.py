"""Attention of a window to a cache and to the window itself."""

from decodax.pallas_kernels.window_attention.attention import (
    Added,
    Bias,
    FixedBias,
    Implementation,
    by_position,
    merge,
    prefix_attention,
    quantized,
    slot_weights,
    window_attention,
    window_attention_lse,
    with_sinks,
)
from decodax.pallas_kernels.window_attention.reference import BLOCK
from decodax.pallas_kernels.window_attention.selection import TopKeys

__all__ = [
    "BLOCK",
    "Added",
    "Bias",
    "FixedBias",
    "Implementation",
    "TopKeys",
    "by_position",
    "merge",
    "prefix_attention",
    "quantized",
    "slot_weights",
    "window_attention",
    "window_attention_lse",
    "with_sinks",
]
