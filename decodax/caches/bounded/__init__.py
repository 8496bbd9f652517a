"""Caches whose size does not grow with the text: one file a paper."""
