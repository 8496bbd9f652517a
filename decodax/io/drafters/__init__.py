"""Reads and writes trained drafters: in this library's layout, and in those that others have published."""

from decodax.io.drafters.files import (
    TrainedDrafter,
    heads_beside,
    holds_drafter,
    load_drafter,
    own_drafter,
    save_drafter,
    shipped_drafter,
)

__all__ = ["TrainedDrafter", "heads_beside", "holds_drafter", "load_drafter", "own_drafter", "save_drafter",
           "shipped_drafter"]
