"""Caches that keep everything and read clusters of tokens with keys that are alike ("ClusterKV: Manipulating LLM KV
Cache in Semantic Space for Recallable Compression", Liu et al., 2024).

Behind a prompt the keys of each head are clustered by the direction that they point in, all but the first tokens, the
sinks. A query takes clusters in the order of its products with their centroids, whole ones until its budget is full,
and of the last one the earliest tokens. It reads these, the sinks, and the tokens that were committed since; of those
there are `every` at most, then they are clustered by themselves. A round commits no token beyond that point, so that
its nodes see what plain decoding would see. Every node of a tree takes clusters of its own.

The authors keep all but what is read in the host's memory. Here everything stays on the device, so that time is saved
and no memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense, write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.wrapper import Wrapper
from decodax.caches.sparse.retrieval import attention_to
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import BLOCK, Bias, merge, window_attention, window_attention_lse


@struct
class Clusters(Struct):
    """The clusters of a layer, of one row or of several.

    Attributes:
        centroids: `f32[..., G, C, d]`, mean keys. sizes: `i32[..., G, C]`, how many tokens each has; 0: there is none.
        starts: `i32[..., G, C]`, the place in `order` of the first one. order: `i32[..., G, S]`, the positions of all
            tokens, those of a cluster one behind the other from the earliest on.
    """

    centroids: Array
    sizes: Array
    starts: Array
    order: Array


def k_means(keys: Array, valid: Array, first: Array, loops: int) -> tuple[Array, Array]:
    """Clusters the keys `f32[n, d]` of a head that are `valid` (`bool[n]`) by the cosine to centroids.

    Args:
        first: `i32[C]`, which keys are the centroids at first; -1: there is no such cluster. loops: how often they are
            moved to the means of their keys; one without any stays where it is.

    Returns:
        The centroids `f32[C, d]`, and which one each key belongs to, `i32[n]`, `C` where it is not valid.
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

    centroids = lax.fori_loop(0, loops, moved, keys[jnp.maximum(first, 0)])
    return centroids, of(centroids)


def drawn(seed: int, start: Array, length: Array, number: Array, most: int) -> Array:
    """`i32[most]`: which of the keys from `start` on and before `length` (`i32[]`) are the first centroids of `number`
    (`i32[]`) clusters; -1: there are no more. Addressed one by one, so that they do not depend on `most`."""
    draw = lambda i: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), i))
    some = jnp.floor(jax.vmap(draw)(jnp.arange(most, dtype=jnp.uint32)) * (length - start)).astype(jnp.int32)
    return jnp.where(jnp.arange(most) < number, start + some, -1)


def clustered(keys: Array, start: Array, length: Array, first: Array, loops: int) -> Clusters:
    """The clusters of the keys `f32[G, n, d]` of a row from `start` on and before `length` (`i32[]`), in each head
    begun with the same ones, `first` (`i32[C]`, -1: none)."""
    at = jnp.arange(keys.shape[1], dtype=jnp.int32)
    valid = (at >= start) & (at < length)
    # head by head, since the cosines of all keys to all centroids are large
    centroids, labels = lax.map(lambda own: k_means(own, valid, first, loops), keys)
    sizes = (labels[:, None] == jnp.arange(len(first))[:, None]).sum(-1, dtype=jnp.int32)
    return Clusters(centroids=centroids, sizes=sizes, starts=jnp.cumsum(sizes, -1) - sizes,
                    order=jnp.argsort(labels, axis=-1, stable=True).astype(jnp.int32))


@struct
class Clustering(KeyValues):
    """Everything, in the order of positions, and the clusters of all but the first tokens and the latest.

    Attributes:
        kv, given, widths: see `KeyValues`. clusters: a tuple of one `Clusters` a layer, arrays `[B, ...]`; None where a
            layer reads everything.
        sinks: `i32[B]`, how many tokens there are before the clustered ones. done: `i32[B]`, where the clustered ones
            end. used: `i32[B]`, how many clusters there are.
        length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    clusters: tuple[Clusters | None, ...]
    sinks: Array
    done: Array
    used: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: KeyClusters = static()

    supports = frozenset({"trees"})

    def horizon(self) -> Array | None:
        return self.kind.every - (self.length - self.done) if self.kv else None

    def for_prompt(self) -> Cache:
        if not self.kv:
            return self
        whole = dense(self.shapes, self.length.shape[0], self.capacity, self.kv[0].dtype, self.given)
        return PromptToCluster(base=whole, shapes=self.shapes, kind=self.kind)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own, clusters = k.shape[1] - q.shape[1], self.clusters[layer]
        entry = k[:, own:], v[:, own:]
        given = q, k, v, window.visible(), window.positions
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, key_positions=window.key_positions)
        if clusters is None:
            return window_attention(*given, self.kv[layer], self.length, sliding=sliding, bias=bias, **options), entry
        if window.certain or bias is not None or softcap is not None:
            raise ValueError(f"cache: {self.kind.name} reads a prompt as a whole, which only the model that answers "
                             "does, and takes no bias and no soft cap of the scores; give a draft model another cache")
        some, at = self._always(layer)
        near = window_attention_lse(*given, some, slot_positions=at, **options)
        each = jax.vmap(lambda kv, clusters, q: self._read(layer, kv, clusters, q))
        far = each_node(functools.partial(each, self.kv[layer], clusters), q.astype(jnp.float32) * scale)
        return merge(near, far)[0], entry

    def _always(self, layer: int) -> tuple[Array, Array]:
        """The first tokens and the latest, `f[B, G, n, d + e]`, and their positions, `i32[B, 1, n]`; -1: none."""
        first = jnp.arange(self.kind.sinks, dtype=jnp.int32)
        late = self.done[:, None] + jnp.arange(min(self.kind.every, self.capacity), dtype=jnp.int32)
        at = jnp.concatenate([jnp.where(first < self.sinks[:, None], first, -1),
                              jnp.where(late < self.length[:, None], late, -1)], 1)
        n = at.shape[1]
        at = jnp.pad(at, ((0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)
        return jnp.take_along_axis(self.kv[layer], jnp.maximum(at, 0)[:, None, :, None], 2), at[:, None]

    def _read(self, layer: int, kv: Array, clusters: Clusters, q: Array) -> tuple[Array, Array]:
        """Attention of a query `f32[H, d]` to the clusters that its heads take, of one row."""
        G, d, n = kv.shape[0], self.widths[layer], self.kind.reads(self.capacity)
        at = taken(clusters, q.reshape(G, -1, d), n)
        some = jax.vmap(lambda own, at: own[jnp.maximum(at, 0)])(kv, at)        # [G, r, n, d + e]
        return attention_to(q[:, None], some.astype(jnp.float32).reshape(len(q), n, -1), (at >= 0).reshape(-1, n), d)

    def commit(self, entries: Entries, slots: Array) -> Clustering:
        if not self.kv:
            return self
        kv = tuple(write(held, jnp.concatenate(entry, -1), slots)
                   for held, entry in zip(self.kv, entries, strict=True))
        new = self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))
        if not self.kind.later(self.capacity):
            return new
        full = new.length - new.done >= self.kind.every
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._grown(full))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _grown(self, rows: Array) -> Clustering:
        """With clusters of the latest tokens of those rows (`bool[B]`)."""
        kind, n, made = self.kind, self.kind.every, []

        def one(row: Any, d: int) -> Clusters:
            own, kv, done, sinks, used, choose = row
            keys = lax.dynamic_slice_in_dim(kv, done, n, 1)[..., :d].astype(jnp.float32)
            none, all_of_them = jnp.int32(0), jnp.int32(n)
            first = drawn(kind.seed, none, all_of_them, jnp.int32(kind.more), kind.more)
            new = clustered(keys, none, all_of_them, first, kind.loops)

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
        return self.replace(clusters=tuple(made), done=grown(self.done, n), used=grown(self.used, kind.more))


def taken(clusters: Clusters, q: Array, count: int) -> Array:
    """`i32[G, r, count]`: the positions of what queries `f32[G, r, d]` of a row take; -1: there are no more."""
    place = places_of(clusters.sizes, clusters.starts, jnp.einsum("grd,gcd->grc", q, clusters.centroids), count)
    at = jax.vmap(lambda order, place: order[jnp.clip(place, 0, len(order) - 1)])(clusters.order, place)
    return jnp.where(place >= 0, at, -1)


def places_of(sizes: Array, starts: Array, worth: Array, count: int, cut: bool = True) -> Array:
    """`i32[G, r, count]`: the places of the tokens of the clusters that are worth most, which have sizes and first
    places `i32[G, C]` and are worth `f32[G, r, C]`; -1: there are no more.

    Args:
        cut: whether of the first cluster that is too large for what is left its earliest tokens are taken; else there
            are no more.
    """
    _, best = lax.top_k(jnp.where(sizes[:, None] > 0, worth, -jnp.inf), worth.shape[-1])
    in_order = lambda x: jax.vmap(lambda own, best: own[best])(x, best)
    sizes, starts = in_order(sizes), in_order(starts)
    ends, slot = jnp.cumsum(sizes, -1), jnp.arange(count, dtype=jnp.int32)
    last = ends[..., -1:] if cut else jnp.where(ends <= count, ends, 0).max(-1, keepdims=True)
    which = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, slot, side="right")))(ends)
    own = lambda x: jnp.take_along_axis(x, jnp.minimum(which, x.shape[-1] - 1), -1)
    return jnp.where(slot < last, own(starts) + slot - (own(ends) - own(sizes)), -1)


@struct
class PromptToCluster(Wrapper):
    """A prompt whose keys will be clustered."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: KeyClusters = static()

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base, kind = self.base, self.kind
        made: list[Clusters | None] = []
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        sinks = jnp.minimum(base.length, kind.sinks)
        number = jnp.maximum((base.length - sinks) // kind.per, 1)
        most = kind.clusters(base.capacity)
        for own, kv, d in zip(into.clusters, base.kv, base.widths, strict=True):
            if own is None:
                made.append(None)
                continue

            def one(row: Any, d: int = d) -> Clusters:
                kv, start, length, number = row
                first = drawn(kind.seed, start, length, number, most)
                return clustered(kv[..., :d].astype(jnp.float32), start, length, first, kind.loops)

            new = lax.map(one, (kv, sinks, base.length, number))
            made.append(jax.tree.map(lambda x, y: x.at[:, :, :y.shape[2]].set(y), own, new))
        return into.replace(kv=base.kv, clusters=tuple(made), sinks=sinks, done=base.length, used=number,
                            length=base.length)


@dataclasses.dataclass(frozen=True)
class KeyClusters(CacheConfig):
    """A `Clustering` cache.

    Attributes:
        budget: tokens that a query reads beside the latest ones, sinks among them.
        per: tokens of a prompt to one cluster. sinks: the first tokens, which are in none.
        every: so many tokens behind the prompt are clustered together, into `more` clusters.
        loops: of k-means. seed: which keys it begins with.
        skip: layers that read everything. new: how many tokens there will be behind the prompt at most (`fit`); None:
            not known. name: what errors call it.
    """

    budget: int
    per: int = 80
    sinks: int = 16
    every: int = 320
    more: int = 8
    loops: int = 20
    seed: int = 0
    skip: tuple[int, ...] = ()
    new: int | None = None
    name: str = "clusterkv"

    def __post_init__(self) -> None:
        for name in ("budget", "per", "every", "more"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.sinks < 0 or self.loops < 0:
            raise ValueError(f"sinks, loops: got {self.sinks} and {self.loops}, takes 0 or more")
        if self.budget <= self.sinks:
            raise ValueError(f"budget: got {self.budget}, takes more than the {self.sinks} first tokens")

    def fit(self, new: int) -> KeyClusters:
        return dataclasses.replace(self, new=new)

    def reads(self, size: int) -> int:
        """Tokens of clusters that a query reads, of texts of so many."""
        return min(self.budget - self.sinks, size)

    def clusters(self, size: int) -> int:
        """The most clusters of a prompt of so many tokens."""
        return max((size - self.sinks) // self.per, 1)

    def later(self, size: int) -> int:
        """The most clusters of what follows a prompt, in texts of so many tokens."""
        return (size if self.new is None else min(self.new, size)) // self.every * self.more

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Clustering:
        """An empty cache."""
        C = self.clusters(size) + self.later(size)
        zeros = lambda *rest, of=jnp.int32: jnp.zeros((batch, *rest), of)
        made: list[Clusters | None] = []
        for layer, shape in enumerate(shapes):
            G = shape.heads
            whole = layer in self.skip or shape.sliding is not None
            made.append(None if whole else Clusters(
                centroids=zeros(G, C, shape.width, of=jnp.float32), sizes=zeros(G, C), starts=zeros(G, C),
                order=zeros(G, size)))
        return Clustering(kv=empty_kv(shapes, batch, size, dtype), clusters=tuple(made), sinks=zeros(), done=zeros(),
                          used=zeros(), length=zeros(), given=inputs, widths=key_widths(shapes), shapes=shapes,
                          kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
