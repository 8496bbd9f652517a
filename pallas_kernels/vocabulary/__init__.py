"""What is computed over a whole vocabulary, which may lie over several devices."""

from decodax.pallas_kernels.vocabulary.nodes import by_nodes
from decodax.pallas_kernels.vocabulary.selection import top_k

__all__ = ["by_nodes", "top_k"]
