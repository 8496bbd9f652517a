"""Decoding methods, for `decodax.generate(..., algorithm=...)`: how the next tokens are proposed and decided.

Every published method is a function of its options, and so is its name: `prompt_lookup(length=5)` is what
`"prompt-lookup:length=5"` means. `names()` lists them. A method that looks at the target is made when `generate` knows
it; `make("fast-dllm", lm)` makes it at once.

>>> from decodax import algorithms
>>> algorithms.prompt_lookup(length=5) == algorithms.make("prompt-lookup", length=5)
True
"""

from __future__ import annotations

import importlib
from typing import Any

from decodax.common.registry import ALGORITHMS

_PACKAGES = ("beams", "contrastive", "diffusion", "entries", "parallel", "speculative")

__all__ = ["find", "make", "names", "parse", "register"]

find, make, names, parse, register = (ALGORITHMS.find, ALGORITHMS.make, ALGORITHMS.names, ALGORITHMS.parse,
                                      ALGORITHMS.register)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:       # imported when they are first asked for: one method does not wait for all others
        return importlib.import_module(f"decodax.algorithms.{name}")
    return ALGORITHMS.attribute(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *ALGORITHMS.identifiers()})
