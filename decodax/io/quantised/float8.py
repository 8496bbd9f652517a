"""Weights of 8-bit floats (e4m3): the method "fp8" of transformers, with one scale for each block of 128 x 128 as in
DeepSeek's files or one for each tensor, and "fbgemm_fp8", with one for each output.

Scales of activations are not read: activations stay floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from decodax.io.quantised.scheme import Linear, Scheme, byte_linear
from decodax.io.quantised.tensors import TensorReader


@dataclasses.dataclass(frozen=True)
class Float8Weights(Scheme):
    """The configuration.

    Attributes:
        blocks: the size of a block, if there are blocks.
    """

    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        size, form = config.get("weight_block_size"), config.get("fmt", "e4m3")
        if form not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"fmt: got {form!r}, takes 'e4m3'")
        if size is not None and not (isinstance(size, list) and len(size) == 2 and all(
                isinstance(n, int) and n > 0 for n in size)):
            raise ValueError(f"weight_block_size: got {size!r}, takes two numbers from 1, or null")
        return cls(() if size is None else (tuple(size),))

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> Linear | None:
        return byte_linear(file, stem, outputs, inputs, ("weight_scale_inv", "weight_scale"), ("F8_E4M3",),
                           self.blocks)

    def unused(self, stem: str) -> tuple[str, ...]:
        return tuple(f"{stem}.{tail}" for tail in ("activation_scale", "input_scale", "input_scale_ub"))
