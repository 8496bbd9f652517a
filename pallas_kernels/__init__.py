"""Kernels. Each folder has `reference.py` in plain XLA, versions for accelerators, and a function that chooses one of
them."""
