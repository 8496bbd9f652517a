"""Loads the weights of a quantised checkpoint: kernels stay packed, everything else becomes arrays.

Some outputs of a tensor are read at a time and written to the place where they stay, so that loading needs little more
memory than the weights themselves.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from decodax.io import huge_pages
from decodax.io.arrays import ArrayReader
from decodax.io.files import FLOATS, CheckpointError, Files
from decodax.io.packed import on_devices
from decodax.io.quantised.scheme import Scheme, StoredLinear
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats import kernels
from decodax.models.formats.published import InputsPermuted
from decodax.models.formats.scaled import Scaled
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.weight_source import Columns, WeightSource, is_table, stored_dtype

CHUNK = 1 << 20
"""Number of weights that are unpacked at a time."""

LOG = logging.getLogger("decodax")


@dataclasses.dataclass(frozen=True)
class QuantisedLayers:
    """The quantised layers of a checkpoint.

    Attributes:
        scheme: the format.
        layers: for each quantised weight by path its layers, one for each expert.
        parts: for each quantised weight by path the columns of the layers that make it up; None: all.
        tensors: names of all tensors that belong to quantised layers, or lie beside them and are not needed.
    """

    scheme: Scheme
    layers: dict[str, list[StoredLinear]]
    parts: dict[str, Columns | None]
    tensors: set[str]


def find_layers(files: Files, scheme: Scheme, where: Mapping[str, WeightSource], shapes: Any) -> QuantisedLayers:
    """Finds the quantised layers of a checkpoint and checks their tensors.

    Args:
        files: the files.
        scheme: the format.
        where: the sources of all weights by path.
        shapes: the pytree of shapes.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """
    plan = QuantisedLayers(scheme, {}, {}, set())
    wanted = {name for source in where.values() for name in source.tensors}
    with TensorReader(files) as file:
        for path, leaf in flatten(shapes).items():
            stems, found, part = _candidates(file, scheme, path, where[path], leaf.shape)
            layers = [layer for layer in found if layer is not None]
            if layers and len(layers) < len(found):
                raise CheckpointError(f"{files.name}: {layers[0].stem} is quantised and {stems[found.index(None)]} is "
                                      "not; takes experts of one kind")
            if layers:
                plan.layers[path], plan.parts[path] = layers, part
                plan.tensors.update(*(layer.tensors for layer in layers), *map(scheme.unused, stems))
                # Older files of GPTQ have biases of zeros in all layers.
                plan.tensors.update(name for stem in stems if (name := f"{stem}.bias") in file and name not in wanted
                                    and not file.whole(name).any())
    return plan


def _candidates(file: TensorReader, scheme: Scheme, path: str, source: WeightSource, shape: tuple[int, ...]
                ) -> tuple[list[str], list[StoredLinear | None], Columns | None]:
    """Returns the names of the layers that may be a weight, the layers, each None if it is not quantised, and the
    columns of them that make up the weight."""
    if path.endswith(".ngrams.table"):
        return [source.tensors[0]], [scheme.table(file, source)], None
    sizes = (source.full if path == "embed" else source.turned(source.full)[::-1])[:2]
    name = source.tensors[0]
    if source.leading:
        apart = [f"{name.rpartition('.')[0]}.{e}.{path.split('.')[-2]}_proj" for e in range(shape[0])]
        if any(other.startswith(f"{apart[0]}.") for other in file.files.home):
            # Some tools quantise each expert by itself where the model has a tensor for all of them.
            return apart, [scheme.linear(file, stem, shape[-1], shape[-2]) for stem in apart], None
        turned = not source.transpose
        return [name], [scheme.expert(file, name, e, (shape[0], *sizes), turned) for e in range(shape[0])], source.part
    if len(sizes) < 2 or not name.endswith(".weight"):
        return [], [], None
    stems = [tensor.removesuffix(".weight") for tensor in source.tensors]
    return stems, [scheme.linear(file, stem, *sizes) for stem in stems], source.part


def load_weights(files: Files, plan: QuantisedLayers, where: Mapping[str, WeightSource], shapes: Any, dtype: str,
                 places: Mapping[str, Sharding]) -> Any:
    """Returns a network's weights.

    Kernels whose floats have another dtype than arrays stay as they are stored and are converted within products.

    Args:
        files: the files.
        plan: a result of `find_layers`. It is emptied, which frees what its layers hold.
        where: the source of each weight by path.
        shapes: the pytree of shapes.
        dtype: dtype of arrays.
        places: the sharding of each weight by path.
    """
    chosen, made, wide = {*kernels(shapes), *filter(is_table, where)}, {}, list[str]()
    with TensorReader(files) as file, ArrayReader(files) as arrays:
        for path, leaf in flatten(shapes).items():
            source, table, place = where[path], is_table(path), places[path]
            bounds = tuple((0, n) for n in leaf.shape)
            layers = [dataclasses.replace(layer, file=file) for layer in plan.layers.pop(path, ())]
            if layers and path in chosen:
                made[path] = on_devices(_packed(layers, plan.parts[path], leaf.shape, table), table, place)
            elif layers:
                wide.append(path)
                values = np.asarray(_packed(layers, plan.parts[path], leaf.shape, table).values(jnp.float32))
                made[path] = jax.device_put(np.swapaxes(values, -1, -2).astype(jnp.dtype(dtype)), place)
            elif path in chosen and (stored := FLOATS[file.dtype(source.tensors[0])]) != dtype:
                found = arrays.read(source, bounds, np.dtype(jnp.dtype(stored)), turned=not table)
                made[path] = on_devices(Scaled(codes=found), table, place)      # type: ignore[arg-type]
            else:
                found = arrays.read(source, bounds, np.dtype(jnp.dtype(stored_dtype(path, dtype))))
                made[path] = jax.device_put(found, place)
    said = list(plan.scheme.notes())
    if wide:
        said.append(f"{len(wide)} weights ({', '.join(wide[:3])}{', ...' if len(wide) > 3 else ''}) become {dtype}, "
                    "since routers and the like are not packed")
    if said:
        LOG.warning("%s: weights that take more memory than in the file: %s", files.name, "; ".join(said))
    return jax.tree.unflatten(jax.tree.structure(shapes), made.values())


def _packed(layers: list[StoredLinear], columns: Columns | None, shape: tuple[int, ...], table: bool) -> Packed:
    """Returns a packed kernel, with NumPy arrays.

    Args:
        layers: its layers, one for each expert.
        columns: the outputs of the layers that make up the weight; None: all.
        shape: shape of the array in its place.
        table: True for an embedding table.
    """
    N, K = shape if table else (shape[-1], shape[-2])
    outputs = np.arange(N) if columns is None else columns.indices(0, N)
    zeroed, ordered = any(layer.zeroed for layer in layers), any(layer.order is not None for layer in layers)
    step, whole = max(CHUNK // K, 1), None
    orders = np.empty((len(layers), K), np.int32)
    for e in range(len(layers)):
        for first in range(0, N, step):
            part = layers[e].read(outputs[first:first + step], zeroed, ordered)
            if whole is None:
                whole = jax.tree.map(lambda a: huge_pages.empty((len(layers) * N, *a.shape[1:]), a.dtype), part)
            at = slice(e * N + first, e * N + min(first + step, N))
            jax.tree.map(lambda a, b, at=at: a.__setitem__(at, b), whole, part)
        order = layers[e].order
        orders[e] = np.arange(K) if order is None else order
        # An expert's tensors are not needed any more.
        layers[e] = dataclasses.replace(layers[e])
    assert whole is not None
    if len(shape) == 3:
        whole = jax.tree.map(lambda a: a.reshape(len(layers), N, *a.shape[1:]), whole)
    elif ordered:
        orders = orders[0]
    return InputsPermuted(kernel=whole, order=orders) if ordered else whole     # type: ignore[arg-type]
