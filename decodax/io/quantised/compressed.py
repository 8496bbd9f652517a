"""compressed-tensors, the format of llm-compressor: W4A16 and W8A16 (`pack-quantized`), W8A8 (`int-quantized`) and FP8
(`float-quantized`), with one scale for a tensor, an output, a group of inputs or a block; MXFP4, MXFP8 and NVFP4
(`mxfp4-pack-quantized`, `mxfp8-quantized`, `nvfp4-pack-quantized`).

Packed codes are `i32[N, ceil(K * bits / 32)]`, with consecutive inputs in a word. Zero points are packed along outputs:
`i32[ceil(N * bits / 32), groups]`. Quantization of activations and of the cache is not applied: activations stay
floats, which is at least as exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.quantised.float4 import float4_linear
from decodax.io.quantised.scheme import SCALES, GroupedLinear, Scheme, StoredLinear, byte_linear, order_of, unpack
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats import mxfp4, nvfp4

FLOAT4 = {"mxfp4-pack-quantized": mxfp4.GROUP, "nvfp4-pack-quantized": nvfp4.GROUP}
"""Formats of 4-bit floats, with the number of inputs that share a scale."""

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense",
           "mxfp8-quantized", *FLOAT4)
"""Values of `format` that are read."""


@dataclasses.dataclass(frozen=True)
class PackedLinear(GroupedLinear):
    """A linear layer of a compressed-tensors checkpoint whose codes are packed into 32-bit words."""

    def codes(self, which: np.ndarray) -> np.ndarray:
        return unpack(self.file.rows(f"{self.stem}.weight_packed", which), self.bits, self.inputs)

    def pairs(self, which: np.ndarray) -> np.ndarray | None:
        return self.file.rows(f"{self.stem}.weight_packed", which).view(np.uint8)[:, :self.inputs // 2]

    def scales(self, which: np.ndarray) -> np.ndarray:
        name = f"{self.stem}.weight_scale"
        one = self.file.shape(name)[:1] != (self.outputs,)
        return np.repeat(self.file.whole(name).reshape(1, 1), len(which), 0) if one else self.file.rows(
            name, which).reshape(len(which), -1)

    @functools.cached_property
    def zeros(self) -> np.ndarray | None:
        name = f"{self.stem}.weight_zero_point"
        if name not in self.file:
            return None
        found = self.file.whole(name)
        if found.dtype == np.int8:
            return np.broadcast_to((found.reshape(-1, self.groups).astype(np.int16) + self.middle).astype(np.uint8),
                                   (self.outputs, self.groups))
        return unpack(found.T, self.bits, self.outputs).T

    @functools.cached_property
    def order(self) -> np.ndarray | None:
        name = f"{self.stem}.weight_g_idx"
        return order_of(self.file, name, self.inputs // self.groups) if name in self.file else None


@dataclasses.dataclass(frozen=True)
class CompressedTensors(Scheme):
    """Reads compressed-tensors checkpoints by their `quantization_config`.

    Attributes:
        bits: the numbers of bits of packed codes that the file may have.
        blocks: the sizes of blocks and of groups that it may have, in outputs and inputs.
    """

    bits: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise ValueError(f"config_groups: got {str(groups)[:60]}, takes an object of groups")
        for form in (config.get("format", "dense"), *(group.get("format") for group in groups.values())):
            if form is not None and form not in FORMATS:
                raise ValueError(f"format: got {form!r}, takes {', '.join(map(repr, FORMATS))}")
        sparse = config.get("sparsity_config") or {}
        if sparse.get("format", "dense") != "dense":
            raise ValueError(f"sparsity_config.format: got {sparse['format']!r}, takes 'dense'")
        if config.get("transform_config"):
            raise ValueError("transform_config: got rotations of weights, takes none")
        bits, blocks = list[int](), list[tuple[int, int]]()
        for name, group in groups.items():
            own = group.get("weights") or {}
            width, size, block = own.get("num_bits", 8), own.get("group_size"), own.get("block_structure")
            form = next((f for f in (group.get("format"), config.get("format")) if f in FLOAT4), None)
            if width not in (2, 3, 4, 5, 6, 7, 8) or (own.get("type") == "float" and width != 8
                                                      and not (form and width == 4)):
                raise ValueError(f"config_groups.{name}.weights.num_bits: got {width} of type {own.get('type')}, takes "
                                 f"2 to 8 of type int, 8 of type float, or 4 of it with format "
                                 f"{' or '.join(map(repr, FLOAT4))}")
            if form and width == 4 and own.get("type") == "float":
                if size != FLOAT4[form] or not own.get("symmetric", True):
                    raise ValueError(f"config_groups.{name}.weights: got group_size {size}, symmetric "
                                     f"{own.get('symmetric')}, format {form!r} takes {FLOAT4[form]} and true")
                continue
            bits.append(width)
            if isinstance(size, int) and size > 0:
                blocks.append((1, size))
            if isinstance(block, list) and len(block) == 2:
                blocks.append((block[0], block[1]))
        return cls(tuple(bits), tuple(blocks))

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        name = f"{stem}.weight_packed"
        if name not in file:
            return byte_linear(file, stem, outputs, inputs, ("weight_scale",), ("I8", "F8_E4M3"), self.blocks,
                               zero="weight_zero_point")
        if file.dtype(name) == "U8":
            return float4_linear(file, stem, outputs, inputs, "weight_packed", "weight_global_scale", divides=True)
        words = lambda count, bits: -(-count * bits // 32)
        file.require(name, tuple((outputs, words(inputs, bits)) for bits in self.bits), ("I32",))
        bits = next(bits for bits in self.bits if file.shape(name)[1] == words(inputs, bits))
        counts = (*(inputs // size for rows, size in self.blocks if rows == 1 and inputs % size == 0), 1)
        scale = file.require(f"{stem}.weight_scale", (*((outputs, count) for count in counts), (outputs,), (1,), ()),
                             SCALES)
        groups = (*file.shape(scale)[1:], 1)[0]
        names = [name, scale]
        if (shape := f"{stem}.weight_shape") in file:
            names.append(shape)
            if file.whole(shape).tolist() != [outputs, inputs]:
                raise CheckpointError(f"{file.where(shape)}: got {file.whole(shape).tolist()}, the configuration "
                                      f"requires {[outputs, inputs]}")
        if (zero := f"{stem}.weight_zero_point") in file:
            if file.dtype(zero) == "I8":
                file.require(zero, ((outputs, groups), (1,), ()), ("I8",))
            else:
                file.require(zero, ((words(outputs, bits), groups),), ("I32",))
            names.append(zero)
        if (index := f"{stem}.weight_g_idx") in file:
            names.append(file.require(index, ((inputs,),), ("I32",)))
        return PackedLinear(file, stem, outputs, inputs, tuple(names), bits, groups)

    def unused(self, stem: str) -> tuple[str, ...]:
        return tuple(f"{stem}.{side}_{tail}" for side in ("input", "output")
                     for tail in ("scale", "zero_point", "global_scale"))

    def notes(self) -> tuple[str, ...]:
        return tuple(f"codes of {bits} bits take {4 if bits < 4 else 8}" for bits in sorted(set(self.bits))
                     if bits not in (4, 8))
