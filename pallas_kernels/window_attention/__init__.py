"""Attention of a window to a cache and to itself."""

from decodax.pallas_kernels.window_attention.reference import (
    BLOCK,
    Bias,
    merge,
    window_attention,
    window_attention_lse,
)

__all__ = ["BLOCK", "Bias", "merge", "window_attention", "window_attention_lse"]
