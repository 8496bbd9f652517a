"""Meshes of virtual devices, and models on them. It imports no torch, beside which collectives on CPU crash."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import decodax as dx


def mesh_of(kind: AxisType | str = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh over the first devices, with axes of these sizes: `mesh_of(data=4, model=2)`."""
    kind = AxisType[kind] if isinstance(kind, str) else kind
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def spread(lm: Any, mesh: Mesh) -> Any:
    """The model with its weights on the mesh."""
    return dataclasses.replace(lm, params=jax.device_put(lm.params, lm.model.shardings(mesh)), mesh=mesh)


def same_tokens(alone: Any, parted: Any, prompts: Any, new: int, **options: Any) -> None:
    """Asserts that two models write the same tokens, without drafts and with them."""
    for algorithm in (None, "prompt-lookup:length=3"):
        want, got = (dx.generate(lm, prompts, max_new_tokens=new, algorithm=algorithm, **options).tokens
                     for lm in (alone, parted))
        np.testing.assert_array_equal(got, want)
