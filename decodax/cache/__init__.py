"""Caches and windows: what has been verified, and what is being scored."""

from decodax.cache.dense import Cache, Dense, WindowKV, dense
from decodax.cache.scratch import AttentionView, Scratch
from decodax.cache.window import Begun, Window, bidirectional, block_causal, causal, causal_prefix, parents, take

__all__ = ["AttentionView", "Begun", "Cache", "Dense", "Scratch", "Window", "WindowKV", "bidirectional", "block_causal",
           "causal", "causal_prefix", "dense", "parents", "take"]
