"""Loads the weights of a GGUF file: kernels stay packed in the file's formats, everything else becomes arrays.

A tensor is read some rows at a time, and each part is written to the place where it stays. So loading needs little more
memory than the weights themselves.
"""

from __future__ import annotations

import collections
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from decodax.common.axes import platform
from decodax.io import huge_pages
from decodax.io.arrays import copy
from decodax.io.files import CheckpointError
from decodax.io.gguf.reader import GgufTensor, package
from decodax.io.gguf.tensors import RowReader, RowSource
from decodax.io.packed import on_devices, packer
from decodax.models.formats import Format, kernels, native
from decodax.models.formats.ggml import TYPES, unpack
from decodax.models.formats.mxfp4 import unpack as unpack_mxfp4
from decodax.models.formats.scaled import Scaled
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.weight_source import stored_dtype

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of tensors of floats."""

PACKED = (*TYPES, "mxfp4")
"""Types that kernels stay packed in, in lower case."""

LOG = logging.getLogger("decodax")


def load_weights(rows: RowReader, sources: dict[str, RowSource], shapes: Any, dtype: str,
                 places: dict[str, Sharding], packing: Format | None) -> Any:
    """Returns a network's weights.

    Args:
        rows: the file.
        sources: the rows of each weight by path.
        shapes: the pytree of shapes.
        dtype: dtype of arrays.
        places: the sharding of each weight by path.
        packing: another format for the kernels; None: the file's own.

    Raises:
        CheckpointError: a tensor has a type that is not decoded.
    """
    leaves = flatten(shapes)
    chosen = {path for path in kernels(shapes) if packing is None or packing.packs(path)}
    widened: dict[str, list[str]] = collections.defaultdict(list)
    made = {}
    for path, leaf in leaves.items():
        source, place, table = sources[path], places[path], path == "embed"
        stacked, packs = leaf.shape if leaf.ndim == 3 else None, path in chosen or table
        packs = packs and source.turn is None and source.values is None
        if packing is not None and path in chosen:
            whole = jax.device_put(_array(rows, source, path, leaf.shape, "float32"), place)
            made[path] = packer(packing, table, leaf.shape, whole.dtype, place)(whole)
        elif packs and source.tensor.type.lower() in PACKED:         # rows are looked up packed
            made[path] = _blocks(rows, source, stacked, table, place)
        elif packs and FLOATS.get(source.tensor.type, dtype) != dtype:
            made[path] = _floats(rows, source, stacked, table, place)
        else:
            if source.tensor.block > 1 and source.values is None:
                widened[source.tensor.type].append(source.tensor.name)
            made[path] = jax.device_put(_array(rows, source, path, leaf.shape, stored_dtype(path, dtype)), place)
    _tell(rows, widened, sources, dtype, packing)
    return jax.tree.unflatten(jax.tree.structure(shapes), made.values())


def _tell(rows: RowReader, widened: dict[str, list[str]], sources: dict[str, RowSource], dtype: str,
          packing: Format | None) -> None:
    """Logs what is not kept as the file has it."""
    said = []
    for kind, names in widened.items():
        why = "no kernel is packed in this type" if kind.lower() not in PACKED else (
            "these are no kernels, or kernels in another order")
        said.append(f"{len(names)} of type {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) become "
                    f"{dtype}, since {why}")
    if platform() != "cpu" and packing is None:
        kinds = sorted({s.tensor.type for s in sources.values() if s.tensor.type[:2] in ("Q5", "Q6")} - widened.keys())
        said += [f"codes of {', '.join(kinds)} take 8 bits on this device"] if kinds else []
    if said:
        LOG.warning("%s: tensors that are not kept as stored: %s", rows.file.path, "; ".join(said))


def _blocks(rows: RowReader, source: RowSource, stacked: tuple[int, ...] | None, table: bool, place: Sharding) -> Any:
    """Loads a kernel in a block format.

    Args:
        rows: the file.
        source: its rows.
        stacked: its shape `(E, K, N)` if it has one kernel for each expert.
        table: True for a table of embeddings.
        place: the sharding of the array in its place.
    """
    kind, total, whole = source.tensor.type.lower(), source.count, None
    by_group = native.usable() and not isinstance(place, NamedSharding)
    for first, raw in rows.chunks(source):
        stored = raw.reshape(len(raw), -1, source.tensor.size)
        part = unpack_mxfp4(stored) if kind == "mxfp4" else unpack(kind, stored, by_group)
        if whole is None:
            whole = jax.tree.map(lambda a: huge_pages.empty((total, *a.shape[1:]), a.dtype), part)
        jax.tree.map(lambda a, b, first=first: a.__setitem__(slice(first, first + len(b)), b), whole, part)
    assert whole is not None
    return _kept(whole, stacked, table, place)


def _floats(rows: RowReader, source: RowSource, stacked: tuple[int, ...] | None, table: bool, place: Sharding) -> Any:
    """Loads a kernel of floats of another dtype than that of arrays, as it is stored; see `_blocks`."""
    stored = np.dtype(jnp.dtype(FLOATS[source.tensor.type]))
    codes = huge_pages.empty((source.count, source.tensor.shape[-1]), stored)
    for first, raw in rows.chunks(source):
        codes[first:first + len(raw)] = raw.view(stored)
    return _kept(Scaled(codes=codes), stacked, table, place)        # type: ignore[arg-type]


def _kept(packed: Packed, stacked: tuple[int, ...] | None, table: bool, place: Sharding) -> Any:
    """Returns a packed kernel of NumPy arrays on the devices where it stays."""
    if stacked is not None:
        packed = jax.tree.map(lambda a: a.reshape(stacked[0], -1, *a.shape[1:]), packed)
    return on_devices(packed, table, place)


def _array(rows: RowReader, source: RowSource, path: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Loads a weight as an array, decoded if it is stored in blocks."""
    if source.values is not None:
        return source.values.astype(jnp.dtype(dtype)).reshape(shape)
    turned = path.endswith(".kernel")
    order = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    found = huge_pages.empty(shape, np.dtype(jnp.dtype(dtype)))
    flat = found.reshape(-1, *order[1:][-1:]) if len(order) == 2 and not turned and source.turn is None else None
    done: list[np.ndarray] = []
    for first, raw in rows.chunks(source):
        part = _decoded(source.tensor, raw, rows).astype(np.float32, copy=False)
        part = part + np.float32(source.shift) if source.shift else part
        if flat is not None:
            flat[first:first + len(part)] = part
        elif turned and len(shape) == 2 and source.turn is None:
            copy(part, found[:, first:first + len(part)].T)
        else:
            done.append(part)
    if done:
        joined = np.concatenate(done)
        whole = (joined if source.turn is None else source.turn(joined)).reshape(order)
        found[...] = np.swapaxes(whole, -1, -2) if turned else whole
    return found


def _decoded(tensor: GgufTensor, raw: np.ndarray, rows: RowReader) -> np.ndarray:
    """Returns the numbers of a tensor's rows, `f32[rows, entries]`.

    Raises:
        CheckpointError: there is no decoder for the type; the message names it and the tensor.
    """
    if tensor.type in FLOATS:
        return raw.view(np.dtype(jnp.dtype(FLOATS[tensor.type])))
    if tensor.type == "I32":
        return raw.view(np.int32)
    quants = package().quants
    try:
        return quants.dequantize(raw, package().GGMLQuantizationType[tensor.type])
    except NotImplementedError:
        raise CheckpointError(f"{rows.file.path}: tensor {tensor.name}: has type {tensor.type}, takes "
                              f"{', '.join(FLOATS)}, {', '.join(kind.upper() for kind in PACKED)}, or another type "
                              "that the package gguf decodes") from None
