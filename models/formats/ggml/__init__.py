"""The block formats of GGML, in which GGUF files store weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.models.formats.format import Format
from decodax.models.formats.ggml import k_quants, legacy
from decodax.models.formats.ggml.blocks import GgmlBlocks, ShiftedGroups
from decodax.models.packed import Packed

__all__ = ["TYPES", "Ggml", "GgmlBlocks", "ShiftedGroups", "unpack"]

TYPES = {kind: (module, module.GROUPS[kind] if module is k_quants else legacy.GROUP)
         for module in (legacy, k_quants) for kind in module.BITS}
"""For each type its module and the number of inputs of a group."""


@dataclasses.dataclass(frozen=True)
class Ggml(Format):
    """A block format of GGML.

    Attributes:
        type: the format's name in lower case, such as "q4_k".
    """

    type: str

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"type: got {self.type!r}, takes {', '.join(map(repr, TYPES))}")

    def pack(self, kernel: Array, seen: Any = None) -> Packed:
        module, group = TYPES[self.type]
        w = jnp.swapaxes(kernel, -1, -2).astype(jnp.float32)
        if w.shape[-1] % group:
            raise ValueError(f"kernel: got {w.shape[-1]} inputs, {self.type} takes a multiple of {group}")
        return module.pack(self.type, w.reshape(*w.shape[:-1], -1, group)).here()


def unpack(kind: str, raw: np.ndarray, by_group: bool = False) -> GgmlBlocks:
    """Returns the kernel that a file stores in blocks.

    Args:
        kind: a key of `TYPES`.
        raw: `u8[N, blocks, bytes]`.
        by_group: True for the form of products in C++; see `GgmlBlocks`.

    Returns:
        The kernel, with NumPy arrays.
    """
    return TYPES[kind][0].unpack(kind, raw, by_group)
