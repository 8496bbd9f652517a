"""Decoding methods for `decodax.generate(..., algorithm=...)`: each defines how next tokens are proposed and decided.

Every published method is a function of its options. `prompt_lookup(length=5)` and the string `"prompt-lookup:length=5"`
mean the same. `names()` lists all methods. A method that depends on the target model is created when `generate` knows
the model; `make("fast-dllm", lm)` creates it at once.

>>> from decodax import algorithms
>>> algorithms.prompt_lookup(length=5) == algorithms.make("prompt-lookup", length=5)
True
"""

from __future__ import annotations

import importlib
from typing import Any

from decodax.common.names import directory
from decodax.common.registry import ALGORITHMS

__all__ = ["beams", "contrastive", "diffusion", "find", "make", "names", "parallel", "parse", "register", "speculative"]

find, make, names, parse, register = (ALGORITHMS.find, ALGORITHMS.make, ALGORITHMS.names, ALGORITHMS.parse,
                                      ALGORITHMS.register)


def __getattr__(name: str) -> Any:
    if name in __all__:         # a package, imported on first use: one method does not wait for all others
        return importlib.import_module(f"decodax.algorithms.{name}")
    return ALGORITHMS.attribute(name)


__dir__ = directory(__all__, ALGORITHMS.identifiers)
