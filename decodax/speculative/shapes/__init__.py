"""How draft trees grow, one file each."""

from decodax.speculative.shapes.fixed import Chain, Fixed

__all__ = ["Chain", "Fixed"]
