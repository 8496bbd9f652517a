"""Measurements: `compare` runs algorithms side by side on the prompts of `tasks`, and `report` reads compiled programs.

The library itself imports nothing from here.
"""

import importlib
from typing import Any

from decodax.common.names import directory

__all__ = ["cache_accuracy", "choose", "compare", "grid", "harness", "plan", "problems", "report", "searches", "tasks"]


def __getattr__(name: str) -> Any:
    if name in __all__:         # imported when they are first asked for
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = directory(__all__)
