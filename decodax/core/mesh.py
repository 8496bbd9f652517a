"""What the core knows of meshes: where rows and heads lie, and how to run under Explicit axes.

The round is written without shardings. Under Auto axes the compiler propagates those of weights and rows. Under
Explicit axes, where most operations on a sharded vocabulary raise, the round runs as a region with Auto axes whose
results get the shardings that the state came with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decodax.common.axes import DATA, MODEL
from decodax.core.cache import Cache, Layout

T = TypeVar("T")


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which arrays are laid out on `mesh`."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def rows(tree: T) -> T:
    """A `PartitionSpec` for each leaf of per-row data: the leading axis over `DATA`."""
    return jax.tree.map(lambda x: PartitionSpec(DATA) if x.ndim else PartitionSpec(), tree)


def heads(cache: T) -> T:
    """As `rows`, for a cache or a tree of them and arrays: see `cache_specs`."""
    held = lambda x: isinstance(x, Cache)
    return jax.tree.map(lambda x: cache_specs(x) if held(x) else _by_heads(x), cache, is_leaf=held)


def cache_specs(cache: T, by_row: bool = True) -> T:
    """A `PartitionSpec` for each leaf of a cache, its layout on a mesh. Rows lie over `DATA`, heads of keys and values
    (`[B, G, S, d]`) over `MODEL`; arrays that rows share are replicated. `Cache.layout` may say otherwise."""
    layout: Layout = cache.layout       # type: ignore[attr-defined]
    own = by_row and layout.by_row
    inside = lambda x: x is not cache and isinstance(x, Cache)
    spec = lambda x: cache_specs(x, own) if inside(x) else _by_heads(x) if own else PartitionSpec()
    specs = jax.tree.map(spec, cache, is_leaf=inside)
    return specs.replace(**layout.specs) if layout.specs and by_row else specs


def _by_heads(x: Any) -> PartitionSpec:
    return PartitionSpec(DATA, MODEL) if x.ndim == 4 else PartitionSpec(DATA)


def auto_region(fn: Callable[..., T], *args: Any, like: T | None = None) -> T:
    """`fn(*args)`; where the context's mesh has Explicit axes, as a region in which they are Auto.

    Args:
        like: a pytree of the result's structure whose shardings the result takes; None traces `fn` to find the
            structure and lets rows lie over `DATA` and a cache's heads over `MODEL`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return fn(*args)
    if like is None:
        with jax.sharding.use_abstract_mesh(mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))):
            shapes = jax.eval_shape(fn, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))
        fits = lambda x, spec: PartitionSpec(*(n if n in mesh.shape and x.shape[i] % mesh.shape[n] == 0 else None
                                               for i, n in enumerate(spec)))
        specs = jax.tree.map(fits, shapes, heads(shapes))
    else:
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, like)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(fn, out_sharding=shardings)(*args)
