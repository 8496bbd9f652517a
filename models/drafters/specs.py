"""Layout of a trained drafter's weights on a mesh: that of a decoder's, so that a device reads its part for each draft.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from decodax.common.axes import MODEL, over
from decodax.models.drafters.head import DraftHead, Weights
from decodax.models.packed import Packed

OUTPUTS = {"attn": ("q", "k", "v"), "mlp": ("gate", "up")}
INPUTS = {"attn": ("o",), "mlp": ("down",)}
"""Kernels in decoder layers whose outputs, or inputs, are divided."""


def head_shardings(head: DraftHead, weights: Weights, mesh: Mesh | AbstractMesh, axis: str = MODEL) -> Any:
    """Returns a `NamedSharding` for each weight of a head.

    Attention heads, MLPs and the vocabulary matrix are divided over `axis` where it divides them. The rest is
    replicated: packed kernels, and the projection of the target's layers, since its divided outputs make XLA divide the
    residual stream and exchange it 15 times a draft.

    Args:
        head: the head.
        weights: its weights, or their shapes.
        mesh: the mesh.
        axis: name of the mesh's axis.
    """
    sizes = {axis: mesh.shape[axis]} if axis in mesh.shape else {}
    # Attention heads are divided whole. Their number is a multiple of that of keys.
    whole = math.gcd(*(layer.heads for layer in head.kv_layers)) % sizes.get(axis, 1) == 0

    def laid(path: Any, x: Any) -> NamedSharding:
        *_, part, name, _ = ("", "", *(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey)))
        spec = PartitionSpec()
        if not isinstance(x, Packed) and len(x.shape) == 2 and (part != "attn" or whole):
            if name in OUTPUTS.get(part, ()) or name == "lm_head":
                spec = PartitionSpec(None, axis)
            elif name in INPUTS.get(part, ()):
                spec = PartitionSpec(axis, None)
        return NamedSharding(mesh, over(spec, x.shape, sizes) if len(spec) else spec)

    return jax.tree_util.tree_map_with_path(laid, weights, is_leaf=lambda x: isinstance(x, Packed))


__all__ = ["head_shardings"]
