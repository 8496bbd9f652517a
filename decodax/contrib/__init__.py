"""Methods that work and are tested, but whose interface may change."""

from decodax.contrib import arc

__all__ = ["arc"]
