"""GPTQ (Frantar et al., 2022) as written by AutoGPTQ and GPTQModel, with and without act-order.

- `qweight` is `i32[K * bits / 32, N]`: words hold consecutive inputs of an output.
- `qzeros` is `i32[groups, N * bits / 32]`: words hold consecutive outputs. Files with `checkpoint_format` "gptq", which
  is the default, store one less than the zero point, modulo the number of codes; "gptq_v2" stores it as it is.
- `scales` is `f16[groups, N]`.
- `g_idx` is `i32[K]`, the group of each input. With act-order (`desc_act`) those of a group are not consecutive.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.quantised.scheme import SCALES, GroupedLinear, Scheme, StoredLinear, order_of, unpack
from decodax.io.quantised.tensors import TensorReader


@dataclasses.dataclass(frozen=True)
class GptqLinear(GroupedLinear):
    """A linear layer of a GPTQ checkpoint: codes with a scale and a zero point for each group of inputs. `shift` is
    added to the stored zero points."""

    shift: int

    @functools.cached_property
    def _words(self) -> np.ndarray:
        return self.file.whole(f"{self.stem}.qweight")

    def codes(self, which: np.ndarray) -> np.ndarray:
        return unpack(self._words[:, which].T, self.bits, self.inputs)

    def pairs(self, which: np.ndarray) -> np.ndarray | None:
        return np.ascontiguousarray(self._words[:, which].T).view(np.uint8)

    def scales(self, which: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self._scales[:, which].T)

    @functools.cached_property
    def _scales(self) -> np.ndarray:
        return self.file.whole(f"{self.stem}.scales")

    @functools.cached_property
    def zeros(self) -> np.ndarray | None:
        found = unpack(self.file.whole(f"{self.stem}.qzeros"), self.bits, self.outputs)
        return ((found + np.uint8(self.shift)) & np.uint8(2 ** self.bits - 1)).T

    @functools.cached_property
    def order(self) -> np.ndarray | None:
        name = f"{self.stem}.g_idx"
        return order_of(self.file, name, self.inputs // self.groups) if name in self.file else None


@dataclasses.dataclass(frozen=True)
class Gptq(Scheme):
    """Reads GPTQ checkpoints by their `quantization_config`.

    Attributes:
        bits: number of bits of a code.
        group: number of inputs of a group; -1: all.
        shift: number that is added to stored zero points.
    """

    bits: int
    group: int
    shift: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        form = config.get("checkpoint_format") or ("marlin" if config.get("is_marlin_format") else "gptq")
        shifts = {"gptq": 1, "gptq_v2": 0}
        if form not in shifts:
            raise ValueError(f"checkpoint_format: got {form!r}, takes {', '.join(map(repr, shifts))}")
        bits, group = config.get("bits"), config.get("group_size", 128)
        if bits not in (2, 3, 4, 8):
            raise ValueError(f"bits: got {bits!r}, takes 2, 3, 4 or 8")
        if not isinstance(group, int) or (group < 1 and group != -1):
            raise ValueError(f"group_size: got {group!r}, takes -1 or a number from 1")
        return cls(bits, group, shifts[form])

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        if f"{stem}.qweight" not in file:
            return None
        size = inputs if self.group == -1 else self.group
        groups, left = divmod(inputs, size)
        if left:
            raise CheckpointError(f"{file.where(f'{stem}.qweight')}: got {inputs} inputs, takes a multiple of the "
                                  f"group_size {size}")
        words = lambda count: -(-count * self.bits // 32)
        names = [file.require(f"{stem}.qweight", ((words(inputs), outputs),), ("I32",)),
                 file.require(f"{stem}.scales", ((groups, outputs),), SCALES),
                 file.require(f"{stem}.qzeros", ((groups, words(outputs)),), ("I32",))]
        if f"{stem}.g_idx" in file:
            names.append(file.require(f"{stem}.g_idx", ((inputs,),), ("I32",)))
        return GptqLinear(file, stem, outputs, inputs, tuple(names), self.bits, groups, self.shift)

    def notes(self) -> tuple[str, ...]:
        return (f"codes of {self.bits} bits take 4",) if self.bits < 4 else ()
