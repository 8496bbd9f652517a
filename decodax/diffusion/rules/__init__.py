"""The rules of one step: where it works, in which order and how much is decided, what is taken back, when it ends."""
