"""Matrix products with weights that are stored as integer codes and scales."""

from decodax.pallas_kernels.packed_matmul.matmul import Axes, Implementation, packed_matmul

__all__ = ["Axes", "Implementation", "packed_matmul"]
