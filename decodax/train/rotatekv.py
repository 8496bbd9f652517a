"""Measures the order in which RotateKV puts the channels of keys (Su et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from decodax.caches.constant import Constant
from decodax.caches.quantize.hadamard import transformed
from decodax.caches.shapes import layers_of
from decodax.core.loaded import network_of
from decodax.train.samples import observed


def fit_order(lm: Any, texts: Sequence[Sequence[int]], heads: int = 4, params: Any = None) -> Constant:
    """Measures the order of channels for RotateKV: channels are sorted by their sum over the tokens of texts, after the
    Hadamard transform.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids of typical texts.
        heads: number of heads that are transformed together.
        params: the weights of a bare `Model`.

    Returns:
        The option `order` of `decodax.caches.rotatekv`.
    """
    made = []
    for own, shape in zip(observed(lm, texts, params), layers_of(network_of(lm)[0]), strict=True):
        wide = int(np.gcd(heads, shape.heads) * shape.width)
        spread = np.asarray(transformed(jnp.asarray(own.keys.reshape(len(own.keys), -1)), wide))
        made.append(np.argsort(spread.sum(0, dtype=np.float64), kind="stable").astype(np.int32))
    return Constant(np.stack(made))
