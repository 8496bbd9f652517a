"""AWQ (Lin et al., 2023) as written by AutoAWQ, in its version "gemm".

`qweight` is `i32[K, N / 8]` and `qzeros` `i32[groups, N / 8]`: a word holds 8 consecutive outputs, of which the one at
place `ORDER[i]` has the bits from `4 * i` on. `scales` is `f16[groups, N]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.quantised.scheme import SCALES, GroupedLinear, Scheme, StoredLinear, unpack
from decodax.io.quantised.tensors import TensorReader

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Place of the output that each 4 bits of a word hold, the lowest first."""


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Returns the codes of words, `u8[n, 8 * words]`.

    >>> unpack_awq(np.array([[0x75316420]], np.int32)).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    found = unpack(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    return found[..., np.argsort(ORDER)].reshape(len(words), -1)


@dataclasses.dataclass(frozen=True)
class AwqLinear(GroupedLinear):
    """A linear layer of an AWQ checkpoint: 4-bit codes with a scale and a zero point for each group of inputs."""

    @functools.cached_property
    def _words(self) -> np.ndarray:
        return self.file.whole(f"{self.stem}.qweight")

    @functools.cached_property
    def _scales(self) -> np.ndarray:
        return self.file.whole(f"{self.stem}.scales")

    def codes(self, which: np.ndarray) -> np.ndarray:
        first = int(which[0]) // 8
        found = unpack_awq(self._words[:, first:int(which[-1]) // 8 + 1])
        return np.ascontiguousarray(found[:, which - 8 * first].T)

    def scales(self, which: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self._scales[:, which].T)

    @functools.cached_property
    def zeros(self) -> np.ndarray | None:
        return unpack_awq(self.file.whole(f"{self.stem}.qzeros")).T


@dataclasses.dataclass(frozen=True)
class Awq(Scheme):
    """Reads AWQ checkpoints by their `quantization_config`. `group` is the number of inputs of a group; -1: all."""

    group: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        bits, group = config.get("bits", config.get("w_bit", 4)), config.get("group_size", config.get("q_group_size"))
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise ValueError(f"version: got {version!r}, takes 'gemm'")
        if bits != 4:
            raise ValueError(f"bits: got {bits!r}, takes 4")
        if not isinstance(group, int) or (group < 1 and group != -1):
            raise ValueError(f"group_size: got {group!r}, takes -1 or a number from 1")
        return cls(group)

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        if f"{stem}.qweight" not in file:
            return None
        size = inputs if self.group == -1 else self.group
        groups, left = divmod(inputs, size)
        if left or outputs % 8:
            raise CheckpointError(f"{file.where(f'{stem}.qweight')}: got {inputs} inputs and {outputs} outputs, takes "
                                  f"multiples of the group_size {size} and of 8")
        names = (file.require(f"{stem}.qweight", ((inputs, outputs // 8),), ("I32",)),
                 file.require(f"{stem}.scales", ((groups, outputs),), SCALES),
                 file.require(f"{stem}.qzeros", ((groups, outputs // 8),), ("I32",)))
        return AwqLinear(file, stem, outputs, inputs, names, 4, groups)
