"""Methods that work and are tested, and whose interface may change."""

from decodax.contrib import arc

__all__ = ["arc"]
