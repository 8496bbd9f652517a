"""Placement of a batch on a mesh: rows are divided over the axes "data" and "expert". `Transformer.shardings` places
the weights."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decodax.common.axes import ROWS, over, replicas
from decodax.core.mesh import rows
from decodax.sampling import Policy


def batch_specs(tree: Any) -> Any:
    """Returns a `PartitionSpec` for each array of a decoding state or sampling policy, which divides its rows over the
    data axis of a mesh.

    Arrays that all rows of a policy share are replicated.
    """
    specs = rows(tree)
    if not isinstance(tree, Policy):
        return specs
    whole = lambda shared: jax.tree.map(lambda x: PartitionSpec(), shared)
    return specs.replace(stops=whole(tree.stops), tables=whole(tree.tables))


def place(mesh: Mesh | None, tree: Any) -> Any:
    """Places a state, a policy or arrays with a leading batch axis on a mesh. If the mesh is None or has no
    axis for rows, they are returned unchanged.

    Raises:
        ValueError: the number of rows is not divisible by the number of replicas.
    """
    if mesh is None or not any(name in mesh.shape for name in ROWS):
        return tree
    parts, axes = replicas(mesh), dict(mesh.shape)
    for leaf in jax.tree.leaves(tree.own if isinstance(tree, Policy) else tree):
        if leaf.ndim and leaf.shape[0] % parts:
            names = " and ".join(repr(name) for name in ROWS if name in axes)
            raise ValueError(f"batch: got {leaf.shape[0]} rows, takes a multiple of the {parts} replicas "
                             f"(mesh axis {names})")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, over(spec, x.shape, axes)))
    return jax.tree.map(put, tree, batch_specs(tree))
