"""The decoding loop: its types, its state, and the functions `step` and `run`. It imports no algorithm and never
flax."""
