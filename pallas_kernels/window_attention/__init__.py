"""Attention of a window to a cache and to the window itself."""

from decodax.pallas_kernels.window_attention.attention import (
    Implementation,
    prefix_attention,
    quantized,
    slot_weights,
    window_attention,
    window_attention_lse,
)
from decodax.pallas_kernels.window_attention.biases import Added, Bias, FixedBias, by_position
from decodax.pallas_kernels.window_attention.groups import TopGroups
from decodax.pallas_kernels.window_attention.merging import merge, with_sinks
from decodax.pallas_kernels.window_attention.pooled import PooledKeys
from decodax.pallas_kernels.window_attention.reference import BLOCK, whole_blocks
from decodax.pallas_kernels.window_attention.selection import KeyChoice, TopBlocks, TopKeys

__all__ = [
    "BLOCK",
    "Added",
    "Bias",
    "FixedBias",
    "Implementation",
    "KeyChoice",
    "PooledKeys",
    "TopBlocks",
    "TopGroups",
    "TopKeys",
    "by_position",
    "merge",
    "prefix_attention",
    "quantized",
    "slot_weights",
    "whole_blocks",
    "window_attention",
    "window_attention_lse",
    "with_sinks",
]
