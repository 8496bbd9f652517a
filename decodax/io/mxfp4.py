"""Reads the experts of a checkpoint in MXFP4 as they are stored, as packed kernels (`decodax.models.formats.mxfp4`).

In place of a tensor of all experts, `NAME`, such a file has `NAME_blocks`, `u8[E, outputs, G, 16]`, and `NAME_scales`,
`u8[E, outputs, G]`. Some outputs are read at a time and written to the place where they stay, and the weights are never
widened.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from decodax.io import huge_pages
from decodax.io.files import CheckpointError, Files
from decodax.io.packed import shardings
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats.mxfp4 import GROUP, Mxfp4Blocks
from decodax.models.names import WeightSource
from decodax.models.packed import Packed

CHUNK = 1 << 20
"""Number of bytes read at a time."""


@dataclasses.dataclass(frozen=True)
class Mxfp4Source:
    """The place of a packed kernel of all experts in a file.

    Attributes:
        name: the tensor's name, without `_blocks` or `_scales`.
        outputs: the kernel's outputs among those of the tensor.
        full: experts, outputs and groups of the tensor.
        shape: shape of the kernel, `(E, N, K)`.
    """

    name: str
    outputs: slice
    full: tuple[int, int, int]
    shape: tuple[int, int, int]

    @property
    def tensors(self) -> tuple[str, str]:
        return f"{self.name}_blocks", f"{self.name}_scales"

    def check(self, files: Files) -> None:
        """Raises CheckpointError if the tensors of a file have other shapes or dtypes."""
        for tensor, shape in zip(self.tensors, ((*self.full, GROUP // 2), self.full), strict=True):
            if tensor not in files.home:
                raise CheckpointError(f"{files.name}: lacks tensor {tensor}, which the configuration requires")
            found = files.slice(tensor)
            if (tuple(found.get_shape()), found.get_dtype()) != (shape, "U8"):
                raise CheckpointError(f"{files.home[tensor]}: tensor {tensor} is {found.get_dtype()} of shape "
                                      f"{tuple(found.get_shape())}, the configuration requires U8 of shape {shape}")

    def load(self, file: TensorReader, place: Sharding) -> Packed:
        """Reads the kernel. `place` is the sharding of the array that it replaces, `f[E, K, N]`."""
        experts, count, inputs = self.shape
        groups, half = inputs // GROUP, GROUP // 2
        empty: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.uint8)
        shapes = Mxfp4Blocks(codes=empty(experts, count, half, groups), scales=empty(experts, count, groups))
        places = shardings(shapes, False, place)

        @functools.cache        # devices with the same part share one read
        def part(tensor: str, wide: int, e: range, n: range, g: range) -> np.ndarray:
            """Returns the groups `g`, of `wide` bytes each, of the outputs `n` of the experts `e`: `u8[e, n, wide, g]`.
            """
            found = huge_pages.empty((len(e), len(n), wide, len(g)), np.uint8)
            size, first, step = self.full[2] * wide, self.outputs.start, self.outputs.step
            rows = max(CHUNK // (size * step), 1)
            for expert in e:
                for i in range(0, len(n), rows):
                    own = n[i:i + rows]
                    start = (expert * self.full[1] + first + own.start * step) * size
                    # Outputs that alternate with those of another kernel are taken from all of them.
                    raw = file.flat(tensor, start, start + ((len(own) - 1) * step + 1) * size)
                    taken = raw.reshape(-1, self.full[2], wide)[::step, g.start:g.stop]
                    found[expert - e.start, i:i + len(own)] = np.swapaxes(taken, 1, 2)
            return found

        def bounds(index: tuple[slice, ...] | None) -> list[range]:
            return [range(*own.indices(size)) for own, size in zip(index or (), (experts, count, groups), strict=True)]

        blocks, scales = self.tensors
        return Mxfp4Blocks(
            codes=jax.make_array_from_callback(shapes.codes.shape, places.codes, lambda index: part(
                blocks, half, *bounds(None if index is None else (*index[:2], index[3])))),
            scales=jax.make_array_from_callback(shapes.scales.shape, places.scales, lambda index: part(
                scales, 1, *bounds(index))[:, :, 0]))


def packs_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns True if a `config.json` describes a checkpoint in MXFP4."""
    found = config.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


def mxfp4_sources(where: Mapping[str, WeightSource], files: Files,
                  config: Mapping[str, Any]) -> dict[str, Mxfp4Source]:
    """Returns the kernels that a file holds in MXFP4, by the path of the weight, after a check of their tensors.

    Args:
        where: the sources of all weights, as if none was packed.
        files: the files of the directory.
        config: the content of its config.json.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype.
    """
    found: dict[str, Mxfp4Source] = {}
    for path, source in where.items() if packs_mxfp4(config) else ():
        name = source.tensors[0]
        if not source.leading or f"{name}_blocks" not in files.home:
            continue
        experts, inputs, outputs = source.turned(source.full)
        if inputs % GROUP:
            raise CheckpointError(f"{files.home[f'{name}_blocks']}: tensor {name}_blocks: got {inputs} inputs, MXFP4 "
                                  f"takes a multiple of {GROUP}")
        own = slice(0, outputs, 1)
        if (part := source.part) is not None:
            # Either the columns of a part alternate with those of others, or they are all adjacent.
            own = slice(part.start, outputs, part.period) if part.stop - part.start == 1 else slice(
                part.start, part.stop, 1)
        count = len(range(*own.indices(outputs)))
        found[path] = Mxfp4Source(name, own, (experts, outputs, inputs // GROUP), (experts, count, inputs))
        found[path].check(files)
    return found


def packed_tensors(sources: Mapping[str, Mxfp4Source]) -> set[str]:
    """Returns the names of the tensors of packed kernels."""
    return {tensor for source in sources.values() for tensor in source.tensors}
