"""The order in which a TPU stores the axes of weights that are read by row: embeddings by token, experts by number.

XLA stores an argument in the order of axes that tiles of 8 by 128 pad least. If that puts the rows' axis into the
lanes, as for 128 experts of 2880 by 360 channels (GPT-OSS 120B on 8 devices), no row lies in one piece, and each call
begins with a copy of all rows in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.dtypes import itemsize_bits
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding

from decodax.models.config import DecoderConfig

TILE = (8, 128)
"""Numbers of sublanes and lanes of a tile."""


def row_order(shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the order of axes, major to minor, that begins with the first one and is padded least. None if no other
    order is padded less, so that XLA keeps rows in one piece by itself.

    >>> row_order((128, 2880, 360)), row_order((32, 2880, 360)), row_order((128, 2048, 192)), row_order((25136, 2880))
    ((0, 2, 1), None, None, (0, 1))
    """
    parts = (1,) * (len(shape) - 2) + TILE
    padded = {order: math.prod(-(-shape[axis] // part) * part for axis, part in zip(order, parts, strict=True))
              for order in itertools.permutations(range(len(shape)))}
    best = min((order for order in padded if order[0] == 0), key=padded.__getitem__)
    return best if padded[best] > min(padded.values()) else None


def by_row(c: object, weights: dict[str, Any]) -> dict[str, Any]:
    """Returns a decoder's weights, with an untied embedding table and the experts stored by row on TPUs. The dict is
    changed in place, weight by weight, since two copies of all experts may not fit.

    Args:
        c: the configuration. Weights of other networks than decoders stay as they are.
        weights: a nested dict of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
    """
    if not isinstance(c, DecoderConfig):
        return weights
    if not c.tied:      # the head reads all of a tied table in each round, and would read its padding
        weights["embed"] = _placed(weights["embed"], c.vocab)
    for i, layer in enumerate(c.layers):
        if (mixture := layer.mixture) is not None:
            _walk(weights["layers"][str(i)]["mlp" if layer.shortcut is None else "shortcut"], mixture.count)
    return weights


def _walk(weights: dict[str, Any], rows: int) -> None:
    """Stores by row those weights of a mixture whose first axis has one entry for each expert, and changes the dict in
    place."""
    for name, own in weights.items():
        if isinstance(own, dict):
            _walk(own, rows)
        else:
            weights[name] = _placed(own, rows)


def _placed(weight: Any, rows: int) -> Any:
    """Returns a weight, which may be packed, with its arrays of that many rows stored by row."""
    def one(x: Any) -> Any:
        if isinstance(x, np.ndarray) or x.ndim < 2 or x.shape[0] != rows or (
                itemsize_bits(x.dtype) < 8 or not _on_tpus(x.sharding)):
            return x
        order = row_order(x.sharding.shard_shape(x.shape))
        if order is None:
            return x
        place = Format(Layout(major_to_minor=order), x.sharding)
        return jax.device_put(x, place) if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=place)

    return jax.tree.map(one, weight)


def _on_tpus(sharding: Any) -> bool:
    """Returns True if arrays with this sharding lie on TPUs. None, and a mesh without devices, lie on none."""
    if sharding is None or (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
        return False
    return any(device.platform == "tpu" for device in sharding.device_set)
