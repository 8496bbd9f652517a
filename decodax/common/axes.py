"""Names of the mesh axes, and functions that constrain the layout of arrays and functions over them.

Most code is written for whole arrays, without shardings. In a few places it requests a layout by the functions below.
They use the mesh of the context (`jax.set_mesh`) and ignore axes that the mesh lacks, that do not divide a dimension,
or whose layout is not up to the compiler (`AxisType.Auto`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

DATA, MODEL, CONTEXT, EXPERT = "data", "model", "context", "expert"
"""Names of the mesh axes. Rows of a batch are sharded over DATA and EXPERT; heads, MLP and vocabulary over MODEL;
positions of long texts over CONTEXT if the cache supports it (`decodax.caches.context.context_parallel`); whole experts
of mixtures over EXPERT."""

ROWS = (DATA, EXPERT)
"""Names of the axes over which rows are sharded. In the specs that this module takes, DATA stands for all of them."""

T = TypeVar("T")


def on_host(x: Any) -> bool:
    """True if an array, concrete or traced, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def replicas(mesh: Any) -> int:
    """Returns the number of parts into which a mesh divides the rows of a batch. 1 if `mesh` is None."""
    return 1 if mesh is None else math.prod(size for name, size in dict(mesh.shape).items() if name in ROWS)


def by_axes(mesh: Sequence[int]) -> str:
    """Returns a mesh as it is written on the command line.

    >>> by_axes((2, 4))
    '2x4'
    """
    return "x".join(map(str, mesh))


def over(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> PartitionSpec:
    """Returns the layout of an array that `spec` asks for, over those axes that divide its dimensions.

    Args:
        spec: for each dimension the name of an axis, or None; DATA stands for `ROWS`.
        shape: the array's shape.
        axes: sizes of the axes that may be used.
    """
    def one(name: str | None, size: int) -> tuple[str, ...] | str | None:
        found: list[str] = []
        parts = 1
        for each in ROWS if name == DATA else (name,):
            if each is not None and each in axes and size % (parts * axes[each]) == 0:
                found, parts = [*found, each], parts * axes[each]
        return _entry(tuple(found))

    return PartitionSpec(*map(one, spec, shape))


def part(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one device's part of an array with the layout `over(spec, shape, axes)`.

    >>> part(PartitionSpec("data", None, "model"), (8, 3, 10), {"data": 2, "expert": 2, "model": 4})
    (2, 3, 10)
    """
    names = [(name,) if isinstance(name, str) else name or () for name in over(spec, shape, axes)]
    cuts = [math.prod(axes[each] for each in found) for found in names]
    return tuple(size // cut for size, cut in zip(shape, [*cuts, *[1] * (len(shape) - len(cuts))], strict=True))


def _entry(axes: tuple[str, ...]) -> tuple[str, ...] | str | None:
    """Returns the entry of a `PartitionSpec` for a dimension that is sharded over `axes`."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def constrain(tree: T, specs: Any) -> T:
    """Constrains the layout of arrays to `specs`, a pytree of `PartitionSpec`s, as far as the mesh of the context
    allows."""
    mesh, free = jax.sharding.get_abstract_mesh(), free_axes()
    if not free:
        return tree

    def one(x: Array, spec: PartitionSpec) -> Array:
        kind = "pinned_host" if on_host(x) else None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, over(spec, x.shape, free), memory_kind=kind))

    return jax.tree.map(one, tree, specs)


def shardwise(fn: Callable[..., T], specs: Sequence[PartitionSpec], out: Any, *args: Any, whole: bool = False,
              rows: Sequence[str] = ROWS) -> T:
    """Runs `fn(*args)` on each device, with its own shards of the arrays (`jax.shard_map`), or on whole arrays without
    a mesh. `fn` must not depend on other shards, except by collectives of its own.

    Use it where the compiler's own partitioning is bad: it gathers the whole array for some scatters, and it cannot
    partition a kernel at all.

    Args:
        fn: the function.
        specs: layout of each argument, over the axes `DATA`, `MODEL`, `CONTEXT` and `EXPERT`; ignored for an argument
            that is None. An axis that does not divide all dimensions that name it is left out.
        out: layout of the results, a pytree prefix.
        args: the arguments.
        whole: True leaves no axis to the compiler, as kernels require: arrays are replicated along axes that no spec
            names or that are left out.
        rows: names of the axes for which DATA stands in `specs` and `out`.
    """
    free = free_axes()

    def along(name: str) -> tuple[str, ...]:
        found = [each for each in (rows if name == DATA else (name,)) if free.get(each, 1) > 1]
        sizes = [x.shape[i] for x, spec in zip(args, specs, strict=True) if x is not None
                 for i, n in enumerate(spec) if n == name]
        while any(size % math.prod(free[each] for each in found) for size in sizes):
            found.pop()
        return tuple(found)

    chosen = {name: along(name) for spec in specs for name in spec if name is not None}
    names = {each for found in chosen.values() for each in found}
    if not ((whole and free) or names):
        return fn(*args)
    own = lambda spec: PartitionSpec(*(_entry(chosen.get(name, ())) for name in spec))
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
