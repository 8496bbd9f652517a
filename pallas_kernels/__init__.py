"""Kernels, a folder each: `reference.py` in plain XLA, hardware versions beside it, and the function that picks one."""
