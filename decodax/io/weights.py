"""Loads weights of floats from safetensors files onto the devices where they stay, as arrays or packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from decodax.common.axes import platform
from decodax.io import huge_pages
from decodax.io import packed as packed_files
from decodax.io.arrays import ArrayReader
from decodax.io.files import Files
from decodax.models.formats import Format
from decodax.models.formats.scaled import Floats, Scaled
from decodax.models.weight_source import WeightSource, nested, shape_of

DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The default dtype of weights for each stored dtype."""


class Loader(ArrayReader):
    """Loads the weights of a directory one by one.

    Args:
        files: the files.
        shapes: shapes of all weights.
        dtype: name of their dtype.
    """

    def __init__(self, files: Files, shapes: Iterable[tuple[int, ...]], dtype: str):
        super().__init__(files)
        self._blocks = huge_pages.HugeBlocks(sum(map(math.prod, shapes)) * jnp.dtype(dtype).itemsize)

    def load(self, source: WeightSource, shape: tuple[int, ...], name: str, place: jax.sharding.Sharding,
             packing: Format | None = None, table: bool = False) -> Any:
        """Loads one weight. Each device's part is read and cast separately; devices with the same part share one read.

        Args:
            source: the tensors that make up the weight.
            shape: shape of the weight.
            name: its dtype.
            place: its sharding.
            packing: the format in which it is packed; None: an array.
            table: True for an embedding table, `[outputs, inputs]`.
        """
        stored = DTYPES.get(self.files.slice(source.tensors[0]).get_dtype(), "float32")
        here = isinstance(place, SingleDeviceSharding) and platform() == "cpu"
        blocks = self._blocks if here else None
        if here and isinstance(packing, Floats) and packing.dtype in (stored, "float32"):
            # Packed kernels have the layout of files, and this cast is exact.
            found = self.read(source, tuple((0, n) for n in shape), np.dtype(jnp.dtype(packing.dtype)), blocks,
                              not table)
            return packed_files.on_devices(Scaled(codes=found), table, place)       # type: ignore[arg-type]
        parts: dict[Any, np.ndarray] = {}
        dtype = np.dtype(jnp.dtype(name if packing is None else stored))

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
            if bounds not in parts:
                parts[bounds] = self.read(source, bounds, dtype, blocks if packing is None else None)
            return parts[bounds]

        whole = jax.make_array_from_callback(shape, place, read)
        if packing is None:
            return whole
        packed = packed_files.packer(packing, table, shape, dtype, place)(whole)
        del whole
        parts.clear()       # freed before the packed one is copied
        return self._blocks.moved(packed)


def load_all(files: Files, where: dict[str, WeightSource], name: str, packing: Format | None,
             packs: Callable[[str], bool], on: dict[str, jax.sharding.Sharding] | None = None) -> dict[str, Any]:
    """Loads the weights of a model from its files and returns them by dotted path.

    Args:
        files: the files.
        where: their sources by path.
        name: their dtype.
        packing: a format, or None.
        packs: a function that tells by the path if a weight is packed in it.
        on: the sharding of each weight, by path; None: all are on the first device.
    """
    on = on or dict.fromkeys(where, SingleDeviceSharding(jax.local_devices()[0]))
    with Loader(files, map(shape_of, where.values()), name) as loader:
        return nested({path: loader.load(source, shape_of(source), name, on[path], packing if packs(path) else None,
                                         path == "embed") for path, source in where.items()})
