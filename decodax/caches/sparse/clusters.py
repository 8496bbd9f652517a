"""Clusters of tokens whose keys point in similar directions, for caches whose queries read whole clusters: k-means by
cosines, and the tokens of the clusters that a query likes best."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.common.struct import Struct, struct


@struct
class Clusters(Struct):
    """Clusters of the keys of a layer, of one row or of several.

    Attributes:
        centroids: `f32[..., G, C, d]`, mean keys. sizes: `i32[..., G, C]`, numbers of tokens; 0 for no cluster.
        starts: `i32[..., G, C]`, the place in `order` of each cluster's first token. order: `i32[..., G, S]`, positions
            of all tokens, cluster by cluster and in each of them in ascending order.
    """

    centroids: Array
    sizes: Array
    starts: Array
    order: Array

    @classmethod
    def empty(cls, batch: int, heads: int, count: int, size: int, width: int) -> Clusters:
        """Returns `count` clusters without tokens, in texts of up to `size` tokens."""
        zeros = lambda *rest, of=jnp.int32: jnp.zeros((batch, heads, *rest), of)
        return cls(centroids=zeros(count, width, of=jnp.float32), sizes=zeros(count), starts=zeros(count),
                   order=zeros(size))


def k_means(keys: Array, valid: Array, first: Array, iterations: int) -> tuple[Array, Array]:
    """Clusters the keys `f32[n, d]` of one head that are `valid` (`bool[n]`), by their cosines to centroids.

    Args:
        first: `i32[C]`, the keys that are the centroids at first; -1 for no cluster. iterations: how often centroids
            are moved to the means of their keys; one without keys stays where it is.

    Returns:
        The centroids `f32[C, d]`, and the cluster of each key, `i32[n]`, `C` where it is not valid.
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
    """Draws the keys that are the first centroids of `number` (`i32[]`) clusters, from `start` on and before `length`
    (`i32[]`).

    Returns:
        `i32[most]`, -1 for no cluster. Random numbers are addressed one by one, so that they do not depend on `most`.
    """
    draw = lambda i: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), i))
    some = jnp.floor(jax.vmap(draw)(jnp.arange(most, dtype=jnp.uint32)) * (length - start)).astype(jnp.int32)
    return jnp.where(jnp.arange(most) < number, start + some, -1)


def clustered(keys: Array, start: Array, length: Array, first: Array, iterations: int) -> Clusters:
    """Clusters the keys `f32[G, n, d]` of one row from `start` on and before `length` (`i32[]`).

    Args:
        first: `i32[C]`, the first centroids of every head, -1 for no cluster; see `k_means`.
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
    """Clusters the keys of a layer of prompts, all but the first `sinks` (`i32[B]`) of each row, into `number`
    (`i32[B]`) clusters, `most` at most."""

    def one(row: tuple[Array, ...]) -> Clusters:
        keys, start, length, number = row
        first = first_centroids(seed, start, length, number, most)
        return clustered(keys.astype(jnp.float32), start, length, first, iterations)

    return lax.map(one, (prompt.keys(layer), sinks, prompt.length, number))


def cluster_places(sizes: Array, starts: Array, worth: Array, count: int, cut: bool = True) -> Array:
    """Returns the places of `count` tokens of the clusters of highest worth, `i32[G, r, count]`, -1 for no token.

    Args:
        sizes, starts: `i32[G, C]`, as in `Clusters`. worth: `f32[G, r, C]`.
        cut: whether the first cluster that is too large for what is left of `count` gives its earliest tokens; else it
            gives none, and no cluster after it does.
    """
    _, best = lax.top_k(jnp.where(sizes[:, None] > 0, worth, -jnp.inf), worth.shape[-1])
    in_order = lambda x: jax.vmap(lambda own, best: own[best])(x, best)
    sizes, starts = in_order(sizes), in_order(starts)
    ends, slot = jnp.cumsum(sizes, -1), jnp.arange(count, dtype=jnp.int32)
    last = ends[..., -1:] if cut else jnp.where(ends <= count, ends, 0).max(-1, keepdims=True)
    which = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, slot, side="right")))(ends)
    own = lambda x: jnp.take_along_axis(x, jnp.minimum(which, x.shape[-1] - 1), -1)
    return jnp.where(slot < last, own(starts) + slot - (own(ends) - own(sizes)), -1)
