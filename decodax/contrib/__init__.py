"""Methods that work and are tested, but whose interface may change."""

from decodax.contrib import arc, sec

__all__ = ["arc", "sec"]
