"""Fits the low-rank projections of CSKV (Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.caches.constant import Constant
from decodax.caches.quantize.cskv import KVFeatures
from decodax.train.samples import observed


def fit_features(lm: Any, texts: Sequence[Sequence[int]], keys: float | int = 0.2, values: float | int = 0.2,
                 params: Any = None) -> KVFeatures:
    """Fits the projections to features by which CSKV stores keys and values, with the smallest squared error on texts.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids of typical texts.
        keys: number of features of a token's keys. A float between 0 and 1 is a share of the channels of all heads.
        values: number of features of a token's values, likewise.
        params: the weights of a bare `Model`.

    Returns:
        The option `features` of `decodax.caches.cskv`.
    """
    made: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for own in observed(lm, texts, params):
        for into, x, rank, name in ((made[0], own.keys, keys, "keys"), (made[1], own.values, values, "values")):
            flat = x.reshape(len(x), -1).astype(np.float64)
            r = max(round(rank * flat.shape[1]), 1) if isinstance(rank, float) and 0 < rank < 1 else rank
            if not isinstance(r, int) or not 1 <= r <= flat.shape[1]:
                raise ValueError(f"{name}: got {rank}, takes 1 to {flat.shape[1]} features, or a share between 0 and 1")
            into.append(np.linalg.eigh(flat.T @ flat)[1][:, ::-1][:, :r])
    return KVFeatures(*(Constant(np.stack(part).astype(np.float32)) for part in made))
