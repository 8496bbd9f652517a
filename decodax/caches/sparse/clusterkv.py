"""ClusterKV: each query attends to clusters of tokens whose keys are similar ("ClusterKV: Manipulating LLM KV Cache in
Semantic Space for Recallable Compression", Liu et al., 2024).

After a prompt, the keys of each head are clustered by their directions, except those of the first tokens (the sinks). A
query takes the clusters with the largest products of query and centroid until its budget is full, and the earliest
tokens of the last one. It attends to these, to the sinks, and to the tokens that were committed since the last
clustering. When there are `every` of these, they are clustered, too. A round commits no token beyond that point, so its
nodes get the same result as in plain decoding. Each node of a tree takes its own clusters.

The authors store tokens that are not attended to in host memory. Here all tokens are on the device: the cache saves
time but no memory.

Clusters and chosen tokens are those of the authors' code (cb66a22). K-means starts from keys that are drawn once for
all prompts of a length.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.cache.key_values import FittedConfig, KVLayer
from decodax.caches.sparse.clusters import Clusters, cluster_places, clustered, first_centroids, prompt_clusters
from decodax.caches.sparse.reading import IndexedCache, SparseConfig, if_any
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree


@struct
class ClusterKVCache(IndexedCache):
    """All tokens, and the clusters of all but the first and the latest tokens.

    Attributes:
        clusters: the `Clusters` of each layer, with arrays `[B, ...]`; None: the layer attends to all tokens.
        sinks: `i32[B]`, number of first tokens that are not clustered.
        done: `i32[B]`, position where the clustered tokens end.
        used: `i32[B]`, number of clusters.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    clusters: tuple[Clusters | None, ...]
    sinks: Array
    done: Array
    used: Array

    if TYPE_CHECKING:
        kind: ClusterKVConfig

    def max_commit(self) -> Array | None:
        return self.kind.every - (self.length - self.done) if self.kv else None

    def always(self, layer: int) -> Array:
        first = jnp.arange(self.kind.sinks, dtype=jnp.int32)
        late = self.done[:, None] + jnp.arange(min(self.kind.every, self.capacity), dtype=jnp.int32)
        slots = jnp.concatenate([jnp.where(first < self.sinks[:, None], first, -1),
                                 jnp.where(late < self.length[:, None], late, -1)], 1)
        return slots[:, None]

    def select_slots(self, layer: int, q: Array, positions: Array) -> Array:
        G, count = self.shapes[layer].heads, self.kind.reads(self.capacity)
        each = lambda clusters, q: cluster_slots(clusters, q.reshape(G, -1, q.shape[-1]), count).reshape(len(q), count)
        return jax.vmap(each)(self.clusters[layer], q)

    def index(self, prompt: Dense) -> Self:
        kind, made = self.kind, []
        sinks = jnp.minimum(prompt.length, kind.sinks)
        number = jnp.maximum((prompt.length - sinks) // kind.cluster_size, 1)
        for layer, own in enumerate(self.clusters):
            if own is not None:
                new = prompt_clusters(prompt, layer, sinks, number, kind.clusters(prompt.capacity), kind.seed,
                                      kind.iterations)
                own = jax.tree.map(lambda x, y: x.at[:, :, :y.shape[2]].set(y), own, new)
            made.append(own)
        return self.replace(kv=prompt.kv, clusters=tuple(made), sinks=sinks, done=prompt.length, used=number,
                            length=prompt.length)

    def commit(self, entries: Entries, slots: Array) -> Self:
        new = super().commit(entries, slots)
        if not self.kv or not self.kind.later(self.capacity):
            return new
        full = new.length - new.done >= self.kind.every
        return if_any(full, lambda cache: cache._grown(full), new)

    def _grown(self, rows: Array) -> Self:
        """Returns the cache with the latest `every` tokens of `rows` (`bool[B]`) clustered."""
        kind, n, made = self.kind, self.kind.every, []

        def one(row: Any, d: int) -> Clusters:
            own, kv, done, sinks, used, choose = row
            keys = lax.dynamic_slice_in_dim(kv, done, n, 1)[..., :d].astype(jnp.float32)
            none, all_of_them = jnp.int32(0), jnp.int32(n)
            first = first_centroids(kind.seed, none, all_of_them, jnp.int32(kind.new_clusters), kind.new_clusters)
            new = clustered(keys, none, all_of_them, first, kind.iterations)

            def put(old: Array, new: Array, at: Array) -> Array:
                was = lax.dynamic_slice_in_dim(old, at, new.shape[1], 1)
                return lax.dynamic_update_slice_in_dim(old, jnp.where(choose, new, was), at, 1)

            place = done - sinks
            return Clusters(put(own.centroids, new.centroids, used), put(own.sizes, new.sizes, used),
                            put(own.starts, new.starts + place, used), put(own.order, new.order + done, place))

        for own, kv, d in zip(self.clusters, self.kv, self.widths, strict=True):
            made.append(own if own is None else jax.vmap(lambda row, d=d: one(row, d))(
                (own, kv, self.done, self.sinks, self.used, rows)))
        grown = lambda x, by: x + jnp.where(rows, by, 0)
        return self.replace(clusters=tuple(made), done=grown(self.done, n), used=grown(self.used, kind.new_clusters))


def cluster_slots(clusters: Clusters, q: Array, count: int) -> Array:
    """Returns the positions of up to `count` tokens that each query attends to, `i32[G, r, count]`, taken from the
    clusters whose centroids have the largest products with it; -1: none. `q` is `f32[G, r, d]`, the queries of one
    row."""
    worth = jnp.einsum("grd,gcd->grc", q, clusters.centroids)
    place = cluster_places(clusters.sizes, clusters.starts, worth, count)
    at = jax.vmap(lambda order, place: order[jnp.clip(place, 0, len(order) - 1)])(clusters.order, place)
    return jnp.where(place >= 0, at, -1)


@CACHES.register("clusterkv", "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
                 "Liu et al. 2024", family="sparse")
@dataclasses.dataclass(frozen=True)
class ClusterKVConfig(FittedConfig, SparseConfig):
    """Keeps all tokens; each query attends to clusters of tokens whose keys are similar, the first tokens and the
    latest.

    It saves the time of attention to long texts, not memory. Example: `cache="clusterkv:budget=512"`.

    Attributes:
        budget: number of tokens that a query attends to beside the latest ones, sinks included.
        cluster_size: mean number of tokens of a cluster of the prompt.
        sinks: number of first tokens, which are in no cluster and are always attended to.
        every: number of tokens after the prompt that are clustered together.
        new_clusters: number of clusters that these form.
        iterations: number of iterations of k-means.
        seed: seed of the random keys that k-means starts from.
        skip: numbers of layers that attend to all tokens; the first two, as in the authors' code.
    """

    budget: Count = 1024
    cluster_size: Count = 80
    sinks: Whole = 16
    every: Count = 320
    new_clusters: Count = 8
    iterations: Whole = 20
    seed: Whole = 0
    skip: tuple[Whole, ...] = (0, 1)

    name: ClassVar[str] = "clusterkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget <= self.sinks:
            raise ValueError(f"budget: got {self.budget}, takes more than the {self.sinks} first tokens")

    def reads(self, size: int) -> int:
        """Returns the number of tokens of clusters that a query attends to in texts of up to `size` tokens."""
        return min(self.budget - self.sinks, size)

    def clusters(self, size: int) -> int:
        """Returns the maximum number of clusters of a prompt of `size` tokens."""
        return max((size - self.sinks) // self.cluster_size, 1)

    def later(self, size: int) -> int:
        """Returns the maximum number of clusters of tokens after a prompt, in texts of `size` tokens."""
        return self.new_tokens(size) // self.every * self.new_clusters

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        count, zeros = self.clusters(size) + self.later(size), lambda: jnp.zeros(batch, jnp.int32)
        made = tuple(None if self.keeps_dense(layer, x) else Clusters.empty(batch, x.heads, count, size, x.width)
                     for layer, x in enumerate(shapes))
        return ClusterKVCache(clusters=made, sinks=zeros(), done=zeros(), used=zeros(),
                              **self.parts(shapes, batch, size, dtype, inputs))
