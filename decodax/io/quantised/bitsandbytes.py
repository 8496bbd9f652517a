"""bitsandbytes: LLM.int8 (Dettmers et al., 2022), NF4 and FP4 (Dettmers et al., 2023).

- 8 bits: `weight` is `i8[N, K]` and `SCB` has the largest weight of each output. Activations stay floats here; the
  library rounds those that are not outliers to 8 bits.
- 4 bits: `weight` is `u8[N * K / 2, 1]`, two consecutive weights a byte, the first one in the high bits. They are
  indices into `weight.quant_map`. A block of 64 consecutive weights has a scale in `weight.absmax`. With double
  quantization `absmax` is an index into `weight.nested_quant_map`, times one of `weight.nested_absmax` for each 256
  blocks, plus an offset. Sizes and the offset are JSON in `weight.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.quantised.scheme import Scheme, StoredLinear, byte_linear, halves, halves_of_pairs
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats.published import Levels
from decodax.models.packed import Packed


@dataclasses.dataclass(frozen=True)
class TableLinear(StoredLinear):
    """A linear layer of a bitsandbytes checkpoint in 4 bits: each weight is an index into a table of 16 values, times a
    scale for its block."""

    block: int
    nested: int
    offset: float

    @functools.cached_property
    def _table(self) -> tuple[float, ...]:
        return tuple(self.file.whole(f"{self.stem}.weight.quant_map").tolist())

    @functools.cached_property
    def _scales(self) -> np.ndarray:
        """The scales of all blocks, `f32[blocks]`."""
        found, stem = self.file.whole(f"{self.stem}.weight.absmax"), f"{self.stem}.weight.nested_"
        if found.dtype == np.float32:
            return found
        outer = np.repeat(self.file.whole(f"{stem}absmax"), self.nested)[:len(found)]
        return self.file.whole(f"{stem}quant_map")[found] * outer + np.float32(self.offset)

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Packed:
        K, first = self.inputs, int(which[0])
        flat = self.file.flat(f"{self.stem}.weight", first * K // 2, (int(which[-1]) + 1) * K // 2)
        pairs = flat.reshape(-1, K // 2)[which - first]
        pairs = (pairs >> 4) | (pairs << 4)
        codes = halves(np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), K), 0) if K % 4 else \
            halves_of_pairs(pairs, 0)
        group = math.gcd(self.block, K)         # blocks may go over the ends of outputs
        at = (which[:, None].astype(np.int64) * K + np.arange(0, K, group)) // self.block
        return Levels(codes=codes, scales=self._scales[at], table=self._table)      # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class BitsAndBytes(Scheme):
    """Reads bitsandbytes checkpoints by their `quantization_config`.

    Attributes:
        four: True for 4 bits, False for 8.
    """

    four: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        four, eight = (config.get(f"load_in_{bits}bit", config.get(f"_load_in_{bits}bit")) for bits in (4, 8))
        if bool(four) == bool(eight):
            raise ValueError(f"load_in_4bit, load_in_8bit: got {four} and {eight}, takes one of them true")
        return cls(bool(four))

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        if not self.four:
            made = byte_linear(file, stem, outputs, inputs, ("SCB",), ("I8",), factor=1 / 127)
            form = f"{stem}.weight_format"
            if made is None or form not in file:
                return made
            if file.whole(form).reshape(-1).tolist() not in ([0], []):
                raise CheckpointError(f"{file.where(form)}: got {file.whole(form).tolist()}, takes 0 (by rows)")
            return dataclasses.replace(made, tensors=(*made.tensors, form))
        name, kinds = f"{stem}.weight", ("nf4", "fp4")
        state = next((f"{name}.quant_state.bitsandbytes__{kind}" for kind in kinds
                      if f"{name}.quant_state.bitsandbytes__{kind}" in file), None)
        if state is None:
            return None
        try:
            said = json.loads(file.whole(state).tobytes())
            block, shape = int(said["blocksize"]), list(said["shape"])
            nested, offset = int(said.get("nested_blocksize", 1)), float(said.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file.where(state)}: not the JSON of a state ({error!r})") from None
        if shape != [outputs, inputs] or inputs % 2:
            raise CheckpointError(f"{file.where(state)}: got the shape {shape}, takes {[outputs, inputs]} with an even "
                                  "number of inputs")
        size, blocks = outputs * inputs // 2, -(-outputs * inputs // block)
        names = [state, file.require(name, ((size, 1), (1, size), (size,)), ("U8",)),
                 file.require(f"{name}.quant_map", ((16,),), ("F32",)),
                 file.require(f"{name}.absmax", ((blocks,),), ("F32", "U8"))]
        if file.dtype(names[-1]) == "U8":
            names += [file.require(f"{name}.nested_absmax", ((-(-blocks // nested),),), ("F32",)),
                      file.require(f"{name}.nested_quant_map", ((256,),), ("F32",))]
        return TableLinear(file, stem, outputs, inputs, tuple(names), block, nested, offset)
