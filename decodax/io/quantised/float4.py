"""Linear layers of 4-bit floats (E2M1) as checkpoints store them: MXFP4 and NVFP4.

A byte has the codes of two consecutive inputs, `u8[N, K / 2]`. The scales of MXFP4 are exponents, `u8[N, K / 32]`.
Those of NVFP4 are 8-bit floats, `f8_e4m3fn[N, K / 16]`, and one number belongs to the whole layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.quantised.scheme import StoredLinear
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats import mxfp4, nvfp4
from decodax.models.formats.mxfp4 import Mxfp4Blocks
from decodax.models.formats.nvfp4 import Nvfp4Blocks


@dataclasses.dataclass(frozen=True)
class Mxfp4Linear(StoredLinear):
    """A linear layer in MXFP4. Its tensors are those of codes and scales."""

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Mxfp4Blocks:
        codes, scales = (self.file.rows(name, which) for name in self.tensors[:2])
        return Mxfp4Blocks(codes=_by_place(codes.view(np.uint8), mxfp4.GROUP),     # type: ignore[arg-type]
                           scales=scales.view(np.uint8))            # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Nvfp4Linear(StoredLinear):
    """A linear layer in NVFP4. Its tensors are those of codes, scales and the layer's number.

    Attributes:
        divides: True if scales are divided by the layer's number; False if they are multiplied by it.
    """

    divides: bool

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Nvfp4Blocks:
        codes, scales = (self.file.rows(name, which) for name in self.tensors[:2])
        number = self.file.whole(self.tensors[2]).astype(np.float32).reshape(1, 1)
        factor = np.repeat(1 / number if self.divides else number, len(which), 0)
        return Nvfp4Blocks(codes=_by_place(codes, nvfp4.GROUP), scales=scales,      # type: ignore[arg-type]
                           factor=factor)                                           # type: ignore[arg-type]


def _by_place(codes: np.ndarray, group: int) -> np.ndarray:
    """Returns codes in the order of packed kernels: `u8[n, group // 2, G]` from `u8[n, K // 2]`."""
    return np.ascontiguousarray(np.swapaxes(codes.reshape(len(codes), -1, group // 2), -1, -2))


def float4_linear(file: TensorReader, stem: str, outputs: int, inputs: int, codes: str, number: str = "",
                  divides: bool = False, tail: str = "weight_scale") -> StoredLinear:
    """Returns the layer of a name, in NVFP4 if its scales are 8-bit floats (E4M3), else in MXFP4.

    Args:
        file: the file.
        stem: name of the layer.
        outputs, inputs: its sizes.
        codes: last part of the name of the tensor of codes.
        number: last part of the name of NVFP4's number of the whole layer.
        divides: as in `Nvfp4Linear`.
        tail: last part of the name of the tensor of scales.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """
    scale = f"{stem}.{tail}"
    nv = scale in file and file.dtype(scale) == "F8_E4M3"
    group, form = (nvfp4.GROUP, "NVFP4") if nv else (mxfp4.GROUP, "MXFP4")
    if inputs % group:
        raise CheckpointError(f"{file.where(f'{stem}.{codes}')}: got {inputs} inputs, {form} takes a multiple of "
                              f"{group}")
    names = (file.require(f"{stem}.{codes}", ((outputs, inputs // 2),), ("U8", "I8")),
             file.require(scale, ((outputs, inputs // group),), ("F8_E4M3", "U8", "F8_E8M0")))
    if not nv:
        return Mxfp4Linear(file, stem, outputs, inputs, names)
    file.require(f"{stem}.{number}", ((), (1,), (1, 1)), ("F32",))
    return Nvfp4Linear(file, stem, outputs, inputs, (*names, f"{stem}.{number}"), divides)
