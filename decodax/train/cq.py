"""Measures the centroids of CQ ("KV Cache is 1 Bit Per Channel", Zhang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.caches.constant import Constant
from decodax.caches.quantize.cq import Codebooks
from decodax.train.k_means import k_means
from decodax.train.samples import observed


def fit_codebooks(lm: Any, texts: Sequence[Sequence[int]], channels: int = 4, bits: int = 8, loops: int = 100,
                  fisher: bool = True, seed: int = 0, params: Any = None) -> Codebooks:
    """Measures the centroids of CQ, by k-means over each group of channels of each head.

    Args:
        lm, texts, params: see `decodax.train.samples.observed`.
        channels: number of channels of a group, a divisor of the widths of heads. bits: of a group.
        loops: largest number of rounds of k-means. seed: of its beginning.
        fisher: whether points are weighted by the squared gradients of the loss on the next tokens.

    Returns:
        The option `codebooks` of `decodax.caches.cq`.
    """
    if channels < 1 or not 1 <= bits <= 16:
        raise ValueError(f"channels, bits: got {channels} and {bits}, takes 1 or more, and 1 to 16")
    random, books = np.random.default_rng(seed), ([], [])       # type: ignore[var-annotated]
    for own in observed(lm, texts, params, fisher):
        for into, x, weights in ((books[0], own.keys, own.key_weights), (books[1], own.values, own.value_weights)):
            if x.shape[2] % channels:
                raise ValueError(f"channels: got {channels}, takes a divisor of {x.shape[2]}")
            N, G, d = x.shape
            groups = x.reshape(N, G, d // channels, channels).astype(np.float64)
            each = weights.reshape(groups.shape).sum(-1, dtype=np.float64)
            into.append([[k_means(groups[:, g, m], each[:, g, m], 1 << bits, loops, random)
                          for m in range(d // channels)] for g in range(G)])
    return Codebooks(*(Constant(np.array(book, np.float32)) for book in books))
