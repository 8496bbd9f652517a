"""Reads the files of a model directory: JSON, and memory-mapped safetensors, in one file or several with an index.

All files are checked before any weight is read, and an error names the file. For weights in another format, the error
shows how to convert them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from decodax.models.weight_source import unwrapped

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of floats by their names in safetensors."""

DTYPES = {**FLOATS, "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8", "U8": "uint8",
          "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "BOOL": "bool"}
"""Dtypes of tensors that can be read."""

CODES = {name: code for code, name in DTYPES.items()}
"""The name in safetensors of each dtype."""

ALIGNMENT = 64
"""Alignment in bytes at which XLA uses an array's memory without copying it."""

OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.npz")
"""Weight files in formats that cannot be read."""


class CheckpointError(ValueError):
    """A model directory cannot be loaded. The message names the file and the tensor."""


class Files:
    """The safetensors files of a directory, memory-mapped, with an index of their tensors.

    Attributes:
        name: name of the only file, or of the index of several files.
        stored: the name of each tensor in its file. The keys are names without the prefixes that wrapper modules add
            (`unwrapped`).
        home: the file of each tensor, by the same keys.

    Raises:
        CheckpointError: there are no such files, a file is broken, the index is wrong, or the names of two tensors
            differ only in the prefixes of wrappers.
    """

    def __init__(self, root: Path):
        # As in transformers, the whole file takes precedence: an index beside it belongs to an older model.
        self.name = root / ONE if (root / ONE).exists() else root / INDEX
        if not self.name.exists():
            raise CheckpointError(missing(root))
        promised = {} if self.name == root / ONE else _weight_map(root / INDEX)
        paths = sorted({root / name for name in promised.values()}) or [root / ONE]
        homes: dict[str, Path] = {}
        self.handles: dict[Path, Any] = {}
        self._starts: dict[Path, dict[str, int]] = {}
        for path in paths:
            try:
                self.handles[path] = safe_open(path, "np")
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{path}: not a whole safetensors file ({e})") from None
            homes |= dict.fromkeys(self.handles[path].keys(), path)
        for tensor, name in promised.items():
            if homes.get(tensor) != root / name:
                raise CheckpointError(f"{root / INDEX}: places tensor {tensor} in {name}, which does not hold it")
        self.stored: dict[str, str] = {}
        for tensor in homes:
            if (other := self.stored.setdefault(unwrapped(tensor), tensor)) != tensor:
                raise CheckpointError(f"{self.name}: holds tensors {other} and {tensor}, whose names differ only in "
                                      "wrappers")
        self.home = {name: homes[tensor] for name, tensor in self.stored.items()}

    def within(self, anchors: Sequence[str]) -> None:
        """Removes the common prefix of all names, if the model was saved as an attribute of another module.

        Args:
            anchors: names of tensors that every such model has. If none of them exists, but one, the longest first,
                exists exactly once after a prefix, that prefix is removed from all names that begin with it.
        """
        if any(anchor in self.home for anchor in anchors):
            return
        for anchor in sorted(anchors, key=len, reverse=True):
            found = [name.removesuffix(anchor) for name in self.home if name.endswith(f".{anchor}")]
            if len(found) == 1:
                strip = lambda names, prefix=found[0]: {name.removeprefix(prefix): x for name, x in names.items()}
                if len(strip(self.home)) == len(self.home):
                    self.stored, self.home = strip(self.stored), strip(self.home)
                return

    def slice(self, tensor: str) -> Any:
        """Returns the tensor as an object of safetensors that reads the parts by which it is indexed."""
        return self.handles[self.home[tensor]].get_slice(self.stored[tensor])

    def start(self, tensor: str) -> int:
        """Returns the offset in bytes of a tensor's entries in its file."""
        path = self.home[tensor]
        if path not in self._starts:
            with open(path, "rb") as file:
                length, = struct.unpack("<Q", file.read(8))
                head = json.loads(file.read(length))
            self._starts[path] = {name: 8 + length + entry["data_offsets"][0] for name, entry in head.items()
                                  if name != "__metadata__"}
        return self._starts[path][self.stored[tensor]]


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the file name of each tensor from an index file."""
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path}: weight_map: got {str(found)[:60]}, takes an object of tensors and their files")
    for tensor, name in found.items():
        parts = PurePosixPath(name.replace("\\", "/")).parts if isinstance(name, str) else ()
        inside = parts and not parts[0].startswith("/") and ".." not in parts and ":" not in name and "\0" not in name
        if not inside:
            raise CheckpointError(f"{path}: places tensor {tensor} in {str(name)[:80]!r}, takes a file in the same "
                                  "directory")
    return found


def named_tensors(names: Sequence[str]) -> str:
    """Returns the names of tensors for an error, of many the first ones.

    >>> named_tensors(["a"]), named_tensors(list("abcdefg"))
    ('tensor a', 'tensors a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"


def missing(root: Path) -> str:
    """Returns the text of the error for a directory without readable weights, with the commands that convert the
    weights that it has."""
    if (root / "adapter_config.json").is_file():
        return adapter(root)
    gguf = sorted(path.name for path in root.glob("*.gguf"))
    other = sorted(path.name for pattern in OTHERS for path in root.glob(pattern)
                   if path.name not in ("training_args.bin", "optimizer.pt", "scheduler.pt"))
    if gguf and not other:
        return (f"{root}: holds {gguf[0]}, which is a whole model: load the file itself (decodax[gguf]):\n"
                f"    decodax.load({str(root / gguf[0])!r})")
    if other:
        return (f"{root}: holds {other[0]} and neither {ONE} nor {INDEX}. Weights are read from safetensors; "
                "transformers converts them:\n"
                f"    model = transformers.AutoModelForCausalLM.from_pretrained({str(root)!r})\n"
                f"    model.save_pretrained({str(root)!r}, safe_serialization=True)")
    named = sorted(path.name for path in root.glob("*.safetensors"))
    beside = f" beside {', '.join(named[:5])}" if named else ""
    return f"{root}: found neither {ONE} nor {INDEX}{beside}"


def adapter(root: Path) -> str:
    """Returns the text of the error for a directory that holds an adapter and no model."""
    try:
        base = read_json(root / "adapter_config.json").get("base_model_name_or_path")
    except CheckpointError:
        base = None
    return (f"{root}: holds an adapter (adapter_config.json) and not the model that it adapts, {base or 'unnamed'}. "
            f"Load it onto that:\n    decodax.load(\"path/to/model\", adapter={str(root)!r})")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        CheckpointError: the file is missing or does not contain a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not JSON ({e})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got {type(value).__name__}, takes a JSON object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or returns {} if the file does not exist.

    Raises:
        CheckpointError: the file contains something else.
    """
    return read_json(path) if path.is_file() else {}


def write_files(root: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], form: str) -> None:
    """Writes `model.safetensors`, with `form` as the format in its metadata, and `config.json`."""
    root.mkdir(parents=True, exist_ok=True)
    # Written to another file and then renamed: an interrupted save leaves the old file intact, and so do models that
    # use the old one where it is mapped.
    _write_tensors(root / f".{ONE}", tensors, form)
    os.replace(root / f".{ONE}", root / ONE)
    (root / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_tensors(path: Path, tensors: dict[str, np.ndarray], form: str) -> None:
    """Writes a safetensors file in which tensors begin at multiples of 64 bytes, as far as their sizes allow it, so
    that JAX can use them where the file is mapped. In files of the package `safetensors` they begin at multiples of 8.
    """
    head: dict[str, Any] = {"__metadata__": {"format": form}}
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].itemsize, name))
    end = 0
    for name in order:
        x = tensors[name]
        start, end = end, end + x.nbytes
        head[name] = {"dtype": CODES[x.dtype.name], "shape": x.shape, "data_offsets": [start, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
