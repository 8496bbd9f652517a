"""Kernels, each in its own folder: `reference.py` in plain XLA, versions for accelerators, and a function that
chooses."""
