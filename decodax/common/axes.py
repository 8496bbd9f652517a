"""Names of the mesh axes, and functions that constrain the layout of arrays and functions over them.

Most code is written for whole arrays, without shardings. In a few places it requests a layout by the functions below.
They use the mesh of the context (`jax.set_mesh`) and ignore axes that the mesh lacks, that do not divide a dimension,
or whose layout is not up to the compiler (`AxisType.Auto`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

DATA, MODEL, CONTEXT, EXPERT = "data", "model", "context", "expert"
"""Names of the mesh axes. Rows of a batch are sharded over DATA; heads, MLP and vocabulary over MODEL; positions of
long texts over CONTEXT if the cache supports it (`decodax.caches.context.context_parallel`); whole experts of mixtures
over EXPERT."""

T = TypeVar("T")


def on_host(x: Any) -> bool:
    """True if an array, concrete or traced, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def constrain(tree: T, specs: Any) -> T:
    """Constrains the layout of arrays to `specs`, a pytree of `PartitionSpec`s, as far as the mesh of the context
    allows."""
    mesh, free = jax.sharding.get_abstract_mesh(), free_axes()
    if not free:
        return tree

    def one(x: Array, spec: PartitionSpec) -> Array:
        fits = (n if n in free and x.shape[i] % free[n] == 0 else None for i, n in enumerate(spec))
        kind = "pinned_host" if on_host(x) else None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*fits), memory_kind=kind))

    return jax.tree.map(one, tree, specs)


def shardwise(fn: Callable[..., T], specs: Sequence[PartitionSpec], out: Any, *args: Any, whole: bool = False) -> T:
    """Runs `fn(*args)` on each device, with its own shards of the arrays. `fn` must not depend on other shards, except
    by collectives of its own.

    Use it where the compiler's own partitioning is bad: it gathers the whole array for a scatter along other dimensions
    than it expects, and it cannot partition a kernel at all.

    Args:
        fn: the function.
        specs: layout of each argument, over the axes above; ignored for an argument that is None.
        out: layout of the results, a pytree prefix.
        args: the arguments.
        whole: True leaves no axis to the compiler, as kernels require; arrays are replicated along axes that do not
            divide a dimension.
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
    """Returns the platform for which the traced program will probably be compiled: "cpu", "gpu" or "tpu".

    It is that of the context's mesh, or the default one. A program may be lowered for another platform, so code that
    depends on the result also needs `lax.platform_dependent`.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float:
    """Returns the compute capability of the first NVIDIA GPU, such as 9.0; 0 for an AMD GPU. Without a GPU, where
    programs can only be lowered for one, returns that of Hopper."""
    found = str(getattr(jax.devices()[0], "compute_capability", "9.0"))
    return float(found) if found[0].isdigit() else 0.0      # AMD: "gfx942"


def free_axes() -> dict[str, int]:
    """Returns the names and sizes of the axes of the context's mesh whose layout is up to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto}
