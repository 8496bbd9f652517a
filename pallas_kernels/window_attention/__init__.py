"""Attention of a window to a cache and to itself."""

from decodax.pallas_kernels.window_attention.reference import BLOCK, Bias, window_attention

__all__ = ["BLOCK", "Bias", "window_attention"]
