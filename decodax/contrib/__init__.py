"""Methods that work and are tested, but whose interface may change."""

from decodax.common.names import directory
from decodax.contrib import arc, sec

__all__ = ["arc", "sec"]

__dir__ = directory(__all__)
