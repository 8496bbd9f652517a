"""Weights of 8-bit floats (e4m3): the method "fp8" of transformers, with one scale for each block of 128 x 128 as in
DeepSeek's files or one for each tensor, and "fbgemm_fp8", with one for each output. DeepSeek V4 has experts in MXFP4
among them.

Scales of activations are not read: activations stay floats.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from decodax.io.quantised.float4 import float4_linear
from decodax.io.quantised.scheme import SCALES, Scheme, StoredLinear, byte_linear
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats.scaled import Scaled
from decodax.models.packed import Packed
from decodax.models.weight_source import WeightSource


@dataclasses.dataclass(frozen=True)
class ExpertLinear(StoredLinear):
    """An expert's layer in a tensor that holds those of all experts, `[E, K, N]` or `[E, N, K]`.

    Attributes:
        expert: index of the expert.
        block: sizes of a block, in outputs and inputs.
        turned: True if the file has `[E, K, N]`.
    """

    expert: int
    block: tuple[int, int]
    turned: bool

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Packed:
        rows, columns = self.block
        groups = np.arange(0, self.inputs, math.gcd(columns, self.inputs)) // columns
        scales = self._own(self.tensors[1])[which // rows][:, groups].astype(np.float32)
        return Scaled(codes=np.ascontiguousarray(self._codes[which]), scales=scales)    # type: ignore[arg-type]

    @functools.cached_property
    def _codes(self) -> np.ndarray:
        return self._own(self.tensors[0])

    def _own(self, name: str) -> np.ndarray:
        found = self.file.rows(name, np.arange(self.expert, self.expert + 1))[0]
        return found.T if self.turned else found


@dataclasses.dataclass(frozen=True)
class ShardedTable(StoredLinear):
    """A table of embeddings in several tensors that are joined, with one scale. It is read in ascending order of rows.

    Attributes:
        rows: number of rows of each tensor but the last.
    """

    rows: int

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Packed:
        *shards, scale = self.tensors
        found = [self.file.rows(name, own - i * self.rows) for i, name in enumerate(shards)
                 if len(own := which[which // self.rows == i])]
        scales = np.broadcast_to(self.file.whole(scale).astype(np.float32).reshape(1, 1), (len(which), 1))
        return Scaled(codes=np.concatenate(found), scales=np.ascontiguousarray(scales))     # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Float8Weights(Scheme):
    """Reads checkpoints with weights in 8-bit floats (e4m3) and a scale for each tensor, output or block, by their
    `quantization_config`.

    Attributes:
        blocks: outputs and inputs of a block that has one scale, as one pair; empty without blocks.
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

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        if f"{stem}.scale" in file and f"{stem}.weight" in file and file.dtype(f"{stem}.weight") == "I8":
            return float4_linear(file, stem, outputs, inputs, "weight", tail="scale")
        return byte_linear(file, stem, outputs, inputs, ("weight_scale_inv", "weight_scale", "scale"), ("F8_E4M3",),
                           self.blocks)

    def expert(self, file: TensorReader, name: str, expert: int, sizes: tuple[int, int, int], turned: bool
               ) -> StoredLinear | None:
        experts, outputs, inputs = sizes
        if name not in file or file.dtype(name) != "F8_E4M3":
            return None
        shape = lambda n, k: (experts, k, n) if turned else (experts, n, k)
        file.require(name, (shape(outputs, inputs),), ("F8_E4M3",))
        scale = next((other for tail in ("_scale_inv", "_scale") if (other := f"{name}{tail}") in file),
                     f"{name}_scale_inv")
        blocks: dict[tuple[int, ...], tuple[int, int]] = {
            shape(-(-outputs // rows), -(-inputs // columns)): (rows, columns)
            for rows, columns in ((outputs, inputs), (1, inputs), *self.blocks)}
        file.require(scale, tuple(blocks), SCALES)
        return ExpertLinear(file, name, outputs, inputs, (name, scale), expert, blocks[file.shape(scale)], turned)

    def table(self, file: TensorReader, source: WeightSource) -> StoredLinear | None:
        shapes = source.shapes
        if not all(name in file and file.dtype(name) == "F8_E4M3" for name in shapes):
            return None
        for name, shape in shapes.items():
            file.require(name, (shape,), ("F8_E4M3",))
        stem = source.tensors[0].removesuffix(".weight")
        stem = stem.rpartition(".shard_")[0] if source.joined else stem
        scale = file.require(f"{stem}.weight_scale", ((), (1,), (1, 1)), SCALES)
        rows, width = source.full
        return ShardedTable(file, stem, rows, width, (*shapes, scale), source.joined or rows)

    def unused(self, stem: str) -> tuple[str, ...]:
        return tuple(f"{stem}.{tail}" for tail in ("activation_scale", "input_scale", "input_scale_ub"))
