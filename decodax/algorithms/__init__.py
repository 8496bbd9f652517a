"""Decoding methods: how the next tokens of a text are proposed and decided."""

from __future__ import annotations

import importlib
from typing import Any

_PACKAGES = ("beams", "contrastive", "diffusion", "entries", "parallel", "speculative")


def __getattr__(name: str) -> Any:
    # imported when they are first asked for: one method does not wait for all others
    if name not in _PACKAGES:
        raise AttributeError(f"module 'decodax.algorithms' has no attribute {name!r}")
    return importlib.import_module(f"decodax.algorithms.{name}")
