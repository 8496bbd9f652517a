"""Fits the codebooks of A2ATS: centroids of keys, in the metric of the queries that attend to them (He et al., 2025).

Keys are taken before their rotation; queries are rotated to the distance at which the cache scores all keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.entry import AskedEntry
from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant
from decodax.caches.prefill.listening import Listening
from decodax.caches.rotation import rotated, turned
from decodax.caches.shapes import layers_of
from decodax.caches.sparse.a2ats import KeyBooks
from decodax.common.struct import struct
from decodax.core.cache import PyTree
from decodax.core.loaded import network_of
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.train.fitting import padded
from decodax.train.k_means import k_means


@struct
class HearingQueries(Listening):
    """A cache that stores nothing and records: with attention among the tokens of the call alone, its entries are
    keys, values and queries that are not scaled (`AskedEntry`)."""

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = super().heard(layer, q, k, v, window, **options)
        return out, AskedEntry.of(entry, q)


def metric(queries: np.ndarray, damping: float = 1e-6) -> np.ndarray:
    """Returns the lower triangular Cholesky factor of `q^T q` for queries `f[N, d]`, `f32[d, d]`.

    The matrix is scaled so that the mean square of its entries is 1, and `damping` is added to its diagonal.

    Raises:
        ValueError: all queries are zero.
    """
    products = queries.astype(np.float64).T @ queries.astype(np.float64)
    size = np.sqrt(np.square(products).mean())
    if size == 0:
        raise ValueError("texts: got some whose queries of a head are all zero")
    return np.linalg.cholesky(products / size + damping * np.eye(len(products))).astype(np.float32)


def fit_key_books(lm: Any, texts: Sequence[Sequence[int]], count: int = 4096, distance: int = 2048, loops: int = 300,
                  seed: int = 0, params: Any = None) -> KeyBooks:
    """Fits the codebooks of A2ATS: the metric of the queries of each key head, and centroids of keys by k-means.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids; the authors use 65,536 tokens of web texts and 16,384 of random identifiers.
        count: number of centroids of a head.
        distance: distance in tokens at which the cache scores all keys; the positions of the model have to reach it.
        loops: maximum number of iterations of k-means.
        seed: seed of the initial centroids.
        params: the weights of a bare `Model`.

    Returns:
        The option `books` of `decodax.caches.a2ats`.

    Raises:
        ValueError: no texts, an empty one, or numbers below 1.
    """
    if not texts or not all(len(text) for text in texts):
        raise ValueError("texts: got none or an empty one, takes texts of one token or more")
    if not 1 <= count <= 1 << 20 or loops < 0 or distance < 0:
        raise ValueError(f"count, loops, distance: got {count}, {loops} and {distance}, takes 1 to {1 << 20}, and 0 or "
                         "more")
    model, weights = network_of(lm, params)
    shapes, random = tuple(layers_of(model)), np.random.default_rng(seed)
    heard: list[list[tuple[np.ndarray, ...]]] = [[] for _ in shapes]
    for text in texts:
        for layer, parts in enumerate(_hear(model, shapes, distance, weights, padded([text]), np.int32(len(text)))):
            heard[layer].append(tuple(np.asarray(x)[:len(text)] for x in parts))
    centroids, factors = [], []
    for own in heard:
        keys, queries = (np.concatenate(part) for part in zip(*own, strict=True))
        G, d = keys.shape[1:]
        asked = queries.reshape(len(queries), G, -1, d)
        factor: np.ndarray = np.stack([metric(asked[:, g].reshape(-1, d)) for g in range(G)])
        book: np.ndarray = np.stack([k_means(keys[:, g] @ factor[g], np.ones(len(keys)), count, loops, random)
                                     for g in range(G)])
        centroids.append(np.stack([np.linalg.solve(factor[g].T.astype(np.float64), book[g].T).T for g in range(G)]))
        factors.append(factor)
    return KeyBooks(*(Constant(np.stack(part).astype(np.float32)) for part in (centroids, factors)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _hear(model: Model, shapes: tuple[KVLayer, ...], distance: int, params: Any, tokens: Array,
          length: Array) -> list[tuple[Array, ...]]:
    """Returns, for each layer, keys before their rotation, `f32[n, G, d]`, and queries rotated to `distance`, `f32[n,
    H, d]`."""
    live = jnp.arange(tokens.shape[1])[None] < length
    window = causal(tokens, jnp.zeros(1, jnp.int32), live)
    entries, at = model.apply(params, window, HearingQueries()).entries, window.positions
    back = lambda shape, x: turned(shape, x.astype(jnp.float32), -at)
    return [(back(shape, entry.keys)[0], rotated(shape, back(shape, entry.queries), jnp.full_like(at, distance))[0])
            for shape, entry in zip(shapes, entries, strict=True)]
