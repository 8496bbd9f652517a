"""Decoding methods by name, each built from this library's parts.

An entry stands here only when it works: `tests/laws/test_systems.py` runs the laws over all of them. Two papers that
come to the same algorithm are one entry and an alias of it. Those of masked diffusion stand in
`decodax.algorithms.diffusion.samplers`.
"""

# The order of these is the order of the shelf.
# isort: off
from decodax.algorithms.entries import text, models, layers, caches, lengths  # noqa: F401
# isort: on
