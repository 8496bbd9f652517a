"""Computations over a whole vocabulary, which may be divided over devices."""

from decodax.pallas_kernels.vocabulary.nodes import by_nodes
from decodax.pallas_kernels.vocabulary.race import Implementation, choose, draw
from decodax.pallas_kernels.vocabulary.selection import top_k
from decodax.pallas_kernels.vocabulary.temperature import cooled

__all__ = ["Implementation", "by_nodes", "choose", "cooled", "draw", "top_k"]
