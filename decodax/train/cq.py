"""Fits the codebooks of CQ ("KV Cache is 1 Bit Per Channel", Zhang et al., 2024)."""

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
    """Fits the codebooks of CQ, by k-means in each group of channels of each head.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids of typical texts.
        channels: number of channels in a group, a divisor of the width of a head.
        bits: number of bits for a group; its codebook has `2 ** bits` centroids.
        loops: maximum number of iterations of k-means.
        fisher: True weights the numbers by the squared gradients of the loss on the next tokens.
        seed: seed of the initial centroids.
        params: the weights of a bare `Model`.

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
