"""Reads and writes directories of packed weights: the model's `config.json` with an entry that describes the weights.

The name of a tensor is the path of its weight in the network and the field of the packed kernel, such as
"layers.0.attn.q.kernel.codes". Names of nested packed kernels are formed in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from decodax.common.axes import platform
from decodax.common.struct import fields
from decodax.io import huge_pages
from decodax.io.arrays import ArrayReader
from decodax.io.files import CheckpointError, Files, write_files
from decodax.models.formats import KINDS, Format
from decodax.models.packed import Packed, by_expert, for_platform
from decodax.models.weight_source import is_table, plain, stored_dtype

ENTRY = "packed_weights"
"""Key in config.json: for each packed weight its kind and its fields; for an array its dtype and shape."""

STORED = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
"""Dtypes that numpy lacks, and the integer dtypes whose bits are stored instead."""


def write(root: Path, leaves: dict[str, Any], config: dict[str, Any]) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        root: the directory; it is created if necessary.
        leaves: weights by dotted path, some of them packed.
        config: the other entries of `config.json`.
    """
    tensors: dict[str, np.ndarray] = {}
    described = {path: _describe(leaf.stored() if isinstance(leaf, Packed) else leaf, path, tensors)
                 for path, leaf in leaves.items()}
    write_files(root, tensors, config | {ENTRY: described}, "decodax")


def read(root: Path, config: dict[str, Any], shapes: dict[str, jax.ShapeDtypeStruct],
         places: dict[str, Sharding], dtype: str | None) -> dict[str, Any]:
    """Reads the weights of a directory that `write` wrote, some of them packed. Returns them by dotted path.

    Args:
        root: the directory.
        config: the content of its `config.json`.
        shapes: shapes of the network's weights by dotted path.
        places: shardings of the weights by dotted path.
        dtype: dtype of the weights that are not packed; None: the stored dtype.

    Raises:
        CheckpointError: a file is broken, or a weight is missing, unexpected or has another shape than the network's.
            The error is raised before any weight is read.
    """
    described, files = config[ENTRY], Files(root)
    if not isinstance(described, dict) or described.keys() != shapes.keys():
        wrong = sorted(described.keys() ^ shapes.keys())[:5] if isinstance(described, dict) else [str(described)[:40]]
        raise CheckpointError(f"{root / 'config.json'}: {ENTRY}: differs from the network: {', '.join(wrong)}")
    found: dict[str, Any] = {}
    for path, entry in described.items():
        try:
            found[path] = _skeleton(entry, path, files)
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{root / 'config.json'}: {ENTRY}: {path}: {e}") from None
        shape, wanted = found[path].shape, shapes[path].shape
        if isinstance(found[path], Packed) and not is_table(path):
            wanted = (*wanted[:-2], wanted[-1], wanted[-2])
        if shape != wanted:
            raise CheckpointError(f"{files.name}: weight {path} has shape {shape}, the configuration requires {wanted}")
    blocks = huge_pages.HugeBlocks(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found)))
    with ArrayReader(files) as reader:
        load = lambda path: _placed(found[path], path, places[path], functools.partial(_read, reader, blocks), dtype)
        return {path: blocks.moved(load(path)) for path in found}


def _describe(leaf: Any, name: str, tensors: dict[str, np.ndarray]) -> Any:
    """Returns the description of a weight or of one of its fields, and adds its arrays to `tensors`."""
    if isinstance(leaf, Packed):
        parts = {}
        for field in fields(leaf):
            value = getattr(leaf, field.name)
            parts[field.name] = value if field.metadata.get("static") else _describe(value, f"{name}.{field.name}",
                                                                                      tensors)
        return {"kind": type(leaf).__name__, "fields": parts}
    if leaf is None:
        return None
    own = np.asarray(jax.device_get(leaf))
    dtype = own.dtype.name
    tensors[name] = np.ascontiguousarray(own).view(STORED.get(dtype, dtype))
    return {"dtype": dtype, "shape": own.shape}


def _skeleton(entry: Any, name: str, files: Files) -> Any:
    """Returns the described weight with shapes in place of arrays, after a check against the stored tensors."""
    if entry is None:
        return None
    if "dtype" in entry:
        wanted = jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]))
        if name not in files.home:
            raise ValueError(f"{files.name} lacks tensor {name}")
        shape, stored = tuple(files.slice(name).get_shape()), files.slice(name).get_dtype()
        kept = np.dtype(STORED.get(wanted.dtype.name, wanted.dtype))
        form = "BOOL" if kept.kind == "b" else f"{kept.kind}{8 * kept.itemsize}".upper()
        if (stored, shape) != (form, wanted.shape):
            raise ValueError(f"{files.home[name]}: tensor {name} is {stored} of shape {shape}, takes {form} of shape "
                             f"{wanted.shape}")
        return wanted
    kind = KINDS.get(entry["kind"])
    if kind is None:
        raise ValueError(f"kind: got {entry['kind']!r}, takes {', '.join(KINDS)}")
    given = entry["fields"]
    return kind(**{field.name: _hashable(given[field.name]) if field.metadata.get("static") else
                   _skeleton(given[field.name], f"{name}.{field.name}", files) for field in fields(kind)})


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value


def _placed(skeleton: Any, path: str, place: Sharding, read: Callable[..., Array], dtype: str | None) -> Any:
    """Reads a weight and places it; each device's part of an array is read separately."""
    if not isinstance(skeleton, Packed):
        return read(skeleton, path, place, None if dtype is None else stored_dtype(path, dtype))
    table, names = is_table(path), _names(skeleton, path)
    leaves, structure = jax.tree.flatten(skeleton)
    made = [read(leaf, name, where) for leaf, name, where in
            zip(leaves, names, jax.tree.leaves(shardings(skeleton, table, place)), strict=True)]
    own = jax.tree.unflatten(structure, made)
    if not isinstance(place, NamedSharding):
        return for_platform(own)
    return _finisher(tuple(leaves), structure, table, place)(own)


@functools.lru_cache(maxsize=64)
def _finisher(leaves: tuple[jax.ShapeDtypeStruct, ...], structure: Any, table: bool, place: NamedSharding) -> Any:
    """Returns the program that makes stored kernels of a format and shape ready for a mesh."""
    finish = lambda p: p.here().placed(*axes(place, table))
    shapes = jax.eval_shape(finish, jax.tree.unflatten(structure, leaves))
    return jax.jit(finish, out_shardings=shardings(shapes, table, place))


@functools.lru_cache(maxsize=64)
def packer(packing: Format, table: bool, shape: tuple[int, ...], dtype: np.dtype, place: jax.sharding.Sharding) -> Any:
    """Returns a compiled function that packs an array of the given shape and dtype in a format, and places the packed
    kernel on the same devices.

    Args:
        packing: the format.
        table: True for an embedding table, `[outputs, inputs]`.
        shape, dtype, place: shape, dtype and sharding of the weights.
    """
    pack = lambda kernel: packing.pack(kernel.T if table else kernel)
    if not isinstance(place, NamedSharding):
        return jax.jit(pack)
    placed = lambda kernel: pack(kernel).placed(*axes(place, table))
    shapes = jax.eval_shape(placed, jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(placed, out_shardings=shardings(shapes, table, place))


def place_packed(packed: Packed, table: bool, place: Sharding) -> Packed:
    """Places a packed kernel on the devices of the array that it replaces, with the corresponding sharding.

    Args:
        packed: the kernel.
        table: True for an embedding table.
        place: sharding of the array.
    """
    if not isinstance(place, NamedSharding):
        return packed
    own = packed.placed(*axes(place, table))
    return jax.device_put(own, shardings(own, table, place))


def on_devices(packed: Packed, table: bool, place: Sharding) -> Packed:
    """Returns a packed kernel of NumPy arrays in the form of this platform, on the devices where it stays.

    Args:
        packed: the kernel. On one CPU device its memory is used without a copy.
        table: True for an embedding table.
        place: sharding of the array that it replaces.
    """
    if platform() != "cpu":
        return place_packed(for_platform(jax.tree.map(jnp.asarray, packed)), table, place)
    if isinstance(place, NamedSharding):
        return place_packed(packed, table, place)
    return jax.device_put(packed, place)


def axes(place: NamedSharding, table: bool) -> tuple[Any, Any]:
    """Returns the mesh axes of a kernel's outputs and of its inputs, for an array with sharding `place`."""
    *_, inputs, outputs = place.spec[::-1] if table else place.spec
    return outputs, inputs


def layout(packed: Packed, table: bool, spec: PartitionSpec, sizes: dict[str, int]) -> Any:
    """Returns the `PartitionSpec` of each array of a packed kernel that replaces an array with the layout `spec`.

    Experts are divided over their axis, unless their inner channels are divided, too, and the format cannot divide
    inputs (`Packed.divides`): such kernels are multiplied as the compiler decides (`decodax.models.experts`).

    Args:
        packed: the kernel.
        table: True for an embedding table.
        spec: the layout of the array.
        sizes: the sizes of the mesh axes.
    """
    *above, inputs, outputs = spec[::-1] if table else spec
    made = packed.specs(outputs, inputs, sizes)
    parts = max(1 if axis is None else sizes[axis] for axis in (inputs, outputs))
    apart = above and above[0] is not None and (parts == 1 or packed.divides(parts))
    return by_expert(made, above[0]) if apart else made


def shardings(packed: Packed, table: bool, place: Sharding) -> Any:
    """Returns the sharding of each array of a packed kernel, as a pytree, for a kernel that replaces an array with
    sharding `place`."""
    if not isinstance(place, NamedSharding):
        return jax.tree.map(lambda _: place, packed)
    specs = layout(packed, table, place.spec, dict(place.mesh.shape))
    return jax.tree.map(lambda spec: NamedSharding(place.mesh, spec), specs,
                        is_leaf=lambda x: isinstance(x, PartitionSpec))


def _names(packed: Packed, path: str) -> list[str]:
    """Returns the tensor names of the arrays of a packed kernel, in the order of its leaves."""
    found = []
    for field in fields(packed):
        value = getattr(packed, field.name)
        if field.metadata.get("static") or value is None:
            continue
        name = f"{path}.{field.name}"
        found += _names(value, name) if isinstance(value, Packed) else [name]
    return found


def _read(reader: ArrayReader, blocks: huge_pages.HugeBlocks, leaf: jax.ShapeDtypeStruct, name: str, place: Sharding,
          dtype: str | None = None) -> Array:
    source, made = plain(name, *leaf.shape), jnp.dtype(dtype or leaf.dtype)
    bits = np.dtype(STORED.get(leaf.dtype.name, leaf.dtype))
    keeps = made == leaf.dtype and not isinstance(place, NamedSharding) and platform() == "cpu"

    @functools.cache
    def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        return reader.read(source, bounds, bits, blocks if keeps else None).view(leaf.dtype).astype(made, copy=False)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        return part(tuple(s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True)))

    return jax.make_array_from_callback(leaf.shape, place, read)
