"""NVIDIA's Model Optimizer: NVFP4, MXFP4, FP8 and MXFP8, of all layers or of some ("MIXED_PRECISION").

Each layer is read by the dtypes of its tensors: `weight` has 4-bit codes, `u8[N, K / 2]`, or 8-bit floats, and
`weight_scale` its scales. NVFP4 also has `weight_scale_2`, which multiplies them. Scales of activations and of the
cache are not applied: activations stay floats, which is at least as exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from decodax.io.files import CheckpointError
from decodax.io.quantised.float4 import float4_linear
from decodax.io.quantised.scheme import Scheme, StoredLinear, byte_linear
from decodax.io.quantised.tensors import TensorReader

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ", "W4A8_MXFP4_FP8", "FP8",
              "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "MIXED_PRECISION")
"""Values of `quant_algo` that are read."""

BLOCKS = ((1, 32),)
"""Outputs and inputs of the blocks of MXFP8 that share a scale."""


@dataclasses.dataclass(frozen=True)
class ModelOptimizer(Scheme):
    """Reads checkpoints of NVIDIA's Model Optimizer, by `quantization_config` or by the file `hf_quant_config.json`."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        found = config.get("quantization", config)
        name = found.get("quant_algo") if isinstance(found, Mapping) else None
        if str(name).upper() not in ALGORITHMS:
            raise ValueError(f"quant_algo: got {name!r}, takes {', '.join(map(repr, ALGORITHMS))}")
        return cls()

    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        name, scaled = f"{stem}.weight", f"{stem}.pre_quant_scale"
        if scaled in file:
            raise CheckpointError(f"{file.where(scaled)}: got a factor for each input, takes layers without one (AWQ's "
                                  "are read if the tool has merged them into the layer before)")
        if name in file and file.dtype(name) == "U8":
            return float4_linear(file, stem, outputs, inputs, "weight", "weight_scale_2", divides=False)
        return byte_linear(file, stem, outputs, inputs, ("weight_scale",), ("F8_E4M3",), BLOCKS)

    def unused(self, stem: str) -> tuple[str, ...]:
        return tuple(f"{stem}.{name}" for name in ("input_scale", "k_scale", "v_scale"))
