"""Clusters of tokens whose keys point in similar directions, for caches whose queries attend to clusters: k-means by
cosines, and the choice of the clusters with the highest scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.common.struct import Struct, struct


@struct
class Clusters(Struct):
    """Clusters of the keys of a layer, for one row or several.

    Attributes:
        centroids: `f32[..., G, C, d]`, mean keys.
        sizes: `i32[..., G, C]`, numbers of tokens; 0: no cluster.
        starts: `i32[..., G, C]`, index in `order` of each cluster's first token.
        order: `i32[..., G, S]`, positions of all tokens, cluster by cluster, in ascending order within each.
    """

    centroids: Array
    sizes: Array
    starts: Array
    order: Array

    @classmethod
    def empty(cls, batch: int, heads: int, count: int, size: int, width: int) -> Clusters:
        """Returns `count` empty clusters for each head, for texts of up to `size` tokens."""
        zeros = lambda *rest, of=jnp.int32: jnp.zeros((batch, heads, *rest), of)
        return cls(centroids=zeros(count, width, of=jnp.float32), sizes=zeros(count), starts=zeros(count),
                   order=zeros(size))


def k_means(keys: Array, valid: Array, first: Array, iterations: int) -> tuple[Array, Array]:
    """Clusters the keys of one head by their cosines to centroids.

    Args:
        keys: `f32[n, d]`.
        valid: `bool[n]`, the keys to cluster.
        first: `i32[C]`, indices of the keys that are the initial centroids; -1: no cluster.
        iterations: number of times that centroids are moved to the means of their keys. A centroid without keys is not
            moved.

    Returns:
        The centroids `f32[C, d]`, and the cluster of each key, `i32[n]`; `C` for keys that are not valid.
    """
    unit = lambda x: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)
    C, directions = len(first), unit(keys)

    def of(centroids: Array) -> Array:
        cosine = jnp.where(first >= 0, directions @ unit(centroids).T, -jnp.inf)
        return jnp.where(valid, cosine.argmax(-1).astype(jnp.int32), C)

    def moved(_: int, centroids: Array) -> Array:
        own = (of(centroids)[:, None] == jnp.arange(C)).astype(keys.dtype)
        number = own.sum(0)[:, None]
        return jnp.where(number > 0, own.T @ keys / jnp.maximum(number, 1), centroids)

    centroids = lax.fori_loop(0, iterations, moved, keys[jnp.maximum(first, 0)])
    return centroids, of(centroids)


def first_centroids(seed: int, start: Array, length: Array, number: Array, most: int) -> Array:
    """Draws the keys that are the initial centroids.

    Args:
        seed: seed of the draws.
        start, length: `i32[]`; positions are drawn from `start` to `length - 1`.
        number: `i32[]`, number of clusters.
        most: maximum of `number`, the size of the result. The draws do not depend on it.

    Returns:
        Positions `i32[most]`; -1: no cluster.
    """
    draw = lambda i: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), i))
    some = jnp.floor(jax.vmap(draw)(jnp.arange(most, dtype=jnp.uint32)) * (length - start)).astype(jnp.int32)
    return jnp.where(jnp.arange(most) < number, start + some, -1)


def clustered(keys: Array, start: Array, length: Array, first: Array, iterations: int) -> Clusters:
    """Clusters the keys of one row at positions from `start` to `length - 1`.

    Args:
        keys: `f32[G, n, d]`.
        start, length: `i32[]`.
        first: `i32[C]`, initial centroids of every head; see `k_means`.
        iterations: see `k_means`.
    """
    at = jnp.arange(keys.shape[1], dtype=jnp.int32)
    valid = (at >= start) & (at < length)
    # head by head, since the cosines of all keys to all centroids take much memory
    centroids, labels = lax.map(lambda own: k_means(own, valid, first, iterations), keys)
    sizes = (labels[:, None] == jnp.arange(len(first))[:, None]).sum(-1, dtype=jnp.int32)
    return Clusters(centroids=centroids, sizes=sizes, starts=jnp.cumsum(sizes, -1) - sizes,
                    order=jnp.argsort(labels, axis=-1, stable=True).astype(jnp.int32))


def prompt_clusters(prompt: Dense, layer: int, sinks: Array, number: Array, most: int, seed: int,
                    iterations: int) -> Clusters:
    """Clusters the keys of a layer for all prompts.

    Args:
        prompt: the cache of the prompts.
        layer: number of the layer.
        sinks: `i32[B]`, number of first tokens of each row that are not clustered.
        number: `i32[B]`, number of clusters of each row.
        most: maximum of `number`.
        seed, iterations: see `first_centroids` and `k_means`.
    """

    def one(row: tuple[Array, ...]) -> Clusters:
        keys, start, length, number = row
        first = first_centroids(seed, start, length, number, most)
        return clustered(keys.astype(jnp.float32), start, length, first, iterations)

    return lax.map(one, (prompt.keys(layer), sinks, prompt.length, number))


def cluster_places(sizes: Array, starts: Array, worth: Array, count: int, cut: bool = True) -> Array:
    """Returns indices in `Clusters.order` of up to `count` tokens, taken from the clusters of highest score, `i32[G, r,
    count]`; -1: no token.

    Args:
        sizes, starts: `i32[G, C]`, see `Clusters`.
        worth: `f32[G, r, C]`, scores of the clusters.
        count: number of tokens.
        cut: True takes the earliest tokens of the first cluster that does not fit into `count`. False takes none of it,
            and no later cluster.
    """
    _, best = lax.top_k(jnp.where(sizes[:, None] > 0, worth, -jnp.inf), worth.shape[-1])
    in_order = lambda x: jax.vmap(lambda own, best: own[best])(x, best)
    sizes, starts = in_order(sizes), in_order(starts)
    ends, slot = jnp.cumsum(sizes, -1), jnp.arange(count, dtype=jnp.int32)
    last = ends[..., -1:] if cut else jnp.where(ends <= count, ends, 0).max(-1, keepdims=True)
    which = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, slot, side="right")))(ends)
    own = lambda x: jnp.take_along_axis(x, jnp.minimum(which, x.shape[-1] - 1), -1)
    return jnp.where(slot < last, own(starts) + slot - (own(ends) - own(sizes)), -1)
