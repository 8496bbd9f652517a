"""Placement of a batch on a mesh: rows are divided over the data axis. `Transformer.shardings` places the weights."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decodax.common.axes import DATA
from decodax.core.mesh import rows
from decodax.sampling import Policy


def batch_specs(tree: Any) -> Any:
    """Returns a `PartitionSpec` for each leaf of a state or policy, with rows over the data axis.

    Arrays that all rows of a policy share are replicated.
    """
    specs = rows(tree)
    if not isinstance(tree, Policy):
        return specs
    whole = lambda shared: jax.tree.map(lambda x: PartitionSpec(), shared)
    return specs.replace(stops=whole(tree.stops), tables=whole(tree.tables))


def place(mesh: Mesh | None, tree: Any) -> Any:
    """Places a state, a policy or arrays with a leading batch axis on a mesh. If the mesh is None or has no data axis,
    they are returned unchanged.

    Raises:
        ValueError: the number of rows is not divisible by the number of replicas.
    """
    if mesh is None or DATA not in mesh.shape:
        return tree
    for leaf in jax.tree.leaves(tree.own if isinstance(tree, Policy) else tree):
        if leaf.ndim and leaf.shape[0] % mesh.shape[DATA]:
            raise ValueError(f"batch: got {leaf.shape[0]} rows, takes a multiple of the {mesh.shape[DATA]} replicas "
                             f"(mesh axis {DATA!r})")
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, batch_specs(tree))
