"""The names of the mesh axes, and how arrays and functions are laid out over them.

Code is written without shardings, for whole arrays. It asks for a layout in a few places, by the functions below; these
read the mesh of the context (`jax.set_mesh`) and leave out axes that it lacks, that do not divide a dimension, or that
are not the compiler's to lay out (`AxisType.Auto`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

DATA, MODEL, CONTEXT, EXPERT = "data", "model", "context", "expert"
"""Rows of a batch lie over the first, heads, MLP and vocabulary over the second, positions of long texts over the
third where a cache divides them (`decodax.caches.context.context_parallel`), and whole experts of mixtures over the
fourth."""

T = TypeVar("T")


def on_host(x: Any) -> bool:
    """Whether an array, or one that is traced, lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def constrain(tree: T, specs: Any) -> T:
    """Lays arrays out by `specs`, a pytree of `PartitionSpec`s."""
    mesh, free = jax.sharding.get_abstract_mesh(), free_axes()
    if not free:
        return tree

    def one(x: Array, spec: PartitionSpec) -> Array:
        fits = (n if n in free and x.shape[i] % free[n] == 0 else None for i, n in enumerate(spec))
        kind = "pinned_host" if on_host(x) else None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*fits), memory_kind=kind))

    return jax.tree.map(one, tree, specs)


def shardwise(fn: Callable[..., T], specs: Sequence[PartitionSpec], out: Any, *args: Any, whole: bool = False) -> T:
    """`fn(*args)`, run by each device on its own shards: for what needs no word from another device, or says itself
    what it needs of others.

    The compiler partitions most operations well by itself. A scatter of other dimensions than it expects makes it
    gather the whole array, and a kernel it cannot look into at all.

    Args:
        specs: of each argument, over the axes above; of an argument that is None it means nothing.
        out: of the results, a pytree prefix.
        whole: leave no axis to the compiler, as kernels need it; arrays are repeated along those that do not divide.
    """
    divides = lambda name, size: all(x.shape[i] % size == 0 for x, spec in zip(args, specs, strict=True)
                                     if x is not None for i, n in enumerate(spec) if n == name)
    free = free_axes()
    asked = {name for spec in specs for name in spec}
    names = {name for name, size in free.items() if size > 1 and name in asked and divides(name, size)}
    if not ((whole and free) or names):
        return fn(*args)
    own = lambda spec: PartitionSpec(*(n if n in names else None for n in spec))
    given = [i for i, x in enumerate(args) if x is not None]

    def local(*some: Array) -> T:
        full: list[Any] = [None] * len(args)
        for i, x in zip(given, some, strict=True):
            full[i] = x
        return fn(*full)

    return jax.shard_map(local, in_specs=tuple(own(specs[i]) for i in given),
                         out_specs=jax.tree.map(own, out, is_leaf=lambda x: isinstance(x, PartitionSpec)),
                         axis_names=set(free) if whole else names, check_vma=False)(*(args[i] for i in given))


def platform() -> str:
    """Where the program that is being traced will probably run: "cpu", "gpu" or "tpu".

    It is that of the context's mesh, or the default one. A program may be lowered for another, so what goes by this
    still has to ask `lax.platform_dependent`.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float:
    """That of the NVIDIA GPU that JAX has found, such as 9.0; 0 of an AMD GPU. Without a GPU, where programs for one
    can only be lowered, that of Hopper."""
    found = str(getattr(jax.devices()[0], "compute_capability", "9.0"))
    return float(found) if found[0].isdigit() else 0.0      # AMD: "gfx942"


def free_axes() -> dict[str, int]:
    """The axes of the context's mesh that the compiler lays out, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto}
