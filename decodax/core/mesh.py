"""Device meshes in the core: the axes over which rows and heads are split, and how to run with Explicit axes.

The round is written without shardings. With Auto axes the compiler propagates those of weights and rows. With Explicit
axes most operations on a sharded vocabulary raise, so the round runs in a region with Auto axes, whose results get the
shardings of the incoming state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decodax.common.axes import DATA, MODEL, over
from decodax.core.cache import Cache, Layout

T = TypeVar("T")


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which arrays are placed on `mesh`; None: one that does nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def rows(tree: T) -> T:
    """Returns a `PartitionSpec` for each leaf of per-row data: the leading axis is split over `DATA`."""
    return jax.tree.map(lambda x: PartitionSpec(DATA) if x.ndim else PartitionSpec(), tree)


def heads(cache: T) -> T:
    """Returns a `PartitionSpec` for each leaf of a cache (`cache_specs`), or of a pytree of caches and arrays."""
    held = lambda x: isinstance(x, Cache)
    return jax.tree.map(lambda x: cache_specs(x) if held(x) else _by_heads(x), cache, is_leaf=held)


def cache_specs(cache: T, by_row: bool = True) -> T:
    """Returns a `PartitionSpec` for each leaf of a cache.

    Rows are split over `DATA` and heads of keys and values (`[B, G, S, d]`) over `MODEL`; arrays that rows share are
    replicated. `Cache.layout.specs` overrides this for single fields.
    """
    layout: Layout = cache.layout       # type: ignore[attr-defined]
    own = by_row and layout.by_row
    inside = lambda x: x is not cache and isinstance(x, Cache)
    spec = lambda x: cache_specs(x, own) if inside(x) else _by_heads(x) if own else PartitionSpec()
    specs = jax.tree.map(spec, cache, is_leaf=inside)
    return specs.replace(**layout.specs) if layout.specs and by_row else specs


def _by_heads(x: Any) -> PartitionSpec:
    return PartitionSpec(DATA, MODEL) if x.ndim == 4 else PartitionSpec(DATA)


def auto_region(fn: Callable[..., T], *args: Any, like: T | None = None) -> T:
    """Returns `fn(*args)`. If the mesh of the context has Explicit axes, `fn` runs in a region in which they are Auto.

    Args:
        fn: the function.
        args: its arguments.
        like: a pytree with the structure of the result, whose shardings the result gets. None: `fn` is traced to find
            the structure; rows are split over `DATA` and heads of caches over `MODEL`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return fn(*args)
    if like is None:
        with jax.sharding.use_abstract_mesh(mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))):
            shapes = jax.eval_shape(fn, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))
        specs = jax.tree.map(lambda x, spec: over(spec, x.shape, dict(mesh.shape)), shapes, heads(shapes))
    else:
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, like)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(fn, out_sharding=shardings)(*args)
