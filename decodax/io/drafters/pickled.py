"""Reads the tensors of a file that PyTorch has saved (`.bin`, `.pt`), without PyTorch.

Such a file is a zip archive with a pickle, which describes the tensors, and the bytes of each storage. A pickle can
call any function, so only the few that rebuild tensors are known here; a file that names another one is refused before
it is called.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES: dict[str, Any] = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16, "BFloat16Storage":
    jnp.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16, "CharStorage":
    np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_}
"""Dtypes by the name of their storage in the module `torch`."""


@dataclasses.dataclass(frozen=True)
class _Storage:
    """The numbers of a storage, in one row."""

    numbers: np.ndarray


def _tensor(storage: Any, start: Any, shape: Any, strides: Any, *rest: Any) -> np.ndarray:
    """Returns the part of a storage that a tensor shows."""
    sizes = (start, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or not all(
            type(n) is int and n >= 0 for n in sizes):
        raise pickle.UnpicklingError(f"a tensor of shape {shape} and strides {strides}")
    last = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) == 0:
        return np.zeros(shape, storage.numbers.dtype)
    if last >= storage.numbers.size:
        raise pickle.UnpicklingError(f"a tensor of shape {shape} beyond the {storage.numbers.size} numbers of its "
                                     "storage")
    steps = [step * storage.numbers.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(storage.numbers[start:], shape, steps, writeable=False)


FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda x, *rest: x}
"""Functions that a pickle may call, by module and name."""


class _Tensors(pickle.Unpickler):
    """Unpickles tensors and containers of them."""

    def __init__(self, data: bytes, archive: zipfile.ZipFile, inside: str):
        super().__init__(io.BytesIO(data))
        self.archive, self.inside = archive, inside
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) not in FUNCTIONS:
            raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of a tensor")
        found = FUNCTIONS[module, name]
        # an object of its own, since a pickle can also set attributes of what it names
        return lambda *args: found(*args)

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], str)
                and pid[1] in DTYPES and isinstance(pid[2], str)):
            raise pickle.UnpicklingError("names something beside tensors")
        _, dtype, key, _, count = pid
        if key not in self.storages:
            held = np.frombuffer(self.archive.read(f"{self.inside}data/{key}"), np.dtype(DTYPES[dtype]))
            if held.size < count:
                raise pickle.UnpicklingError(f"storage {key} has {held.size} numbers instead of {count}")
            self.storages[key] = _Storage(held)
        return self.storages[key]


def read_pickled(file: Path) -> dict[str, np.ndarray]:
    """Returns the tensors in a file of PyTorch by name, those of floats in float32.

    Raises:
        ValueError: it is no such file, it was written by a PyTorch before 1.6 or on a machine with another order of
            bytes, or it holds something beside tensors. Nothing in it is executed.
    """
    if not zipfile.is_zipfile(file):
        raise ValueError("is no archive that PyTorch 1.6 or newer has saved; takes one, or a .safetensors file")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if (pickled := next((name for name in names if name.rpartition("/")[2] == "data.pkl"), None)) is None:
            raise ValueError("holds no data.pkl, takes an archive that PyTorch has saved")
        inside = pickled.removesuffix("data.pkl")
        if f"{inside}byteorder" in names and archive.read(f"{inside}byteorder") != b"little":
            raise ValueError("was written in big-endian byte order, takes little-endian")
        try:
            held = _Tensors(archive.read(pickled), archive, inside).load()
        except (pickle.UnpicklingError, KeyError, TypeError, AttributeError, IndexError, EOFError) as error:
            raise ValueError(f"{error}; takes a file of tensors alone") from None
    if not isinstance(held, dict):
        raise ValueError(f"holds a {type(held).__name__}, takes tensors by name")
    if other := [name for name, x in held.items() if not isinstance(name, str) or not isinstance(x, np.ndarray)]:
        raise ValueError(f"holds {other[0]!r} beside tensors, takes a file of tensors alone")
    return {name: np.array(x, np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for name, x in held.items()}


__all__ = ["read_pickled"]
