"""Reads the files of a published drafter, and places their tensors in a head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from decodax.io.drafters.pickled import read_pickled
from decodax.io.drafters.tensors import Tensors
from decodax.io.files import CheckpointError, read_json
from decodax.models.names import flatten
from decodax.models.weight_source import WeightSource


def tensors_in(path: Path) -> Tensors:
    """Returns the tensors in the `.safetensors` files of a directory; if it has none, in its `.bin` and `.pt` files
    (`read_pickled`).

    Raises:
        CheckpointError: there are no such files, or one cannot be read.
    """
    config, files = read_json(path / "config.json"), sorted(path.glob("*.safetensors"))
    pickled = [] if files else sorted([*path.glob("*.bin"), *path.glob("*.pt")])
    if not files and not pickled:
        raise CheckpointError(f"{path}: holds no .safetensors, .bin or .pt file with weights")
    found: dict[str, Any] = {}
    for file in files or pickled:
        try:
            found |= load_file(file) if files else read_pickled(file)
        except Exception as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from None
    return Tensors(found, config, str(path))


def names_in(path: Path) -> set[str]:
    """Returns the names of the tensors in the files that `tensors_in` reads; empty if there are none. Only files
    without the form of `.safetensors` are read whole.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return set(tensors_in(path).names) if any(path.glob("*.bin")) or any(path.glob("*.pt")) else set()
    found: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                found |= set(opened.keys())
        except Exception as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from None
    return found


def placed(tensors: Tensors, head: Any, names: Mapping[str, str], dtype: Any) -> dict[str, Any]:
    """Returns the weights of a head as a nested dict, read from the tensors of a file: `names` has the tensor of each
    weight by its dotted path. Kernels are stored `[out, in]` in the file and are transposed.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the file has others.
    """
    sources = {}
    for path, shape in flatten(head.abstract_params()).items():
        turned = path.endswith("kernel")
        full = shape.shape[::-1] if turned else shape.shape
        sources[path] = WeightSource((names[path],), turned, None, full)
    return tensors.weights(sources, dtype)


def same(tensors: Tensors, names: list[str]) -> None:
    """Checks that the tensors `names` are equal: they are one weight in the authors' code, which saves it several
    times.

    Raises:
        CheckpointError: two of them differ.
    """
    for name in names[1:]:
        if not np.array_equal(tensors[names[0]], tensors[name]):
            raise CheckpointError(f"{tensors.name}: {names[0]!r} and {name!r} differ, which are one tensor in the "
                                  "authors' code")
