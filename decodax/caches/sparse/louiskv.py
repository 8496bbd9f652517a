"""LouisKV: a layer chooses the tokens to attend to only where the query changes ("LouisKV: Efficient KV Cache Retrieval
for Long Input-Output Sequences", Wu et al., 2025).

After a prompt, the keys of each head are clustered, except those of the first tokens (the sinks). While decoding, each
layer compares the queries of a token with those of the token before, by the cosine `r` averaged over heads. If `r <
tau`, the token is a boundary. A new segment begins with it, and each key head chooses clusters and segments: the score
is the softmax of its queries over their mean keys, averaged over the queries, and the best ones are taken until the
budget is full. Until the next boundary, tokens attend to what was chosen there, to the sinks, and to the latest tokens,
which are in the buffer. A segment can be chosen once it has left the buffer: it leaves when the buffer is full and it
is the oldest one in it. Segments are never clustered.

The buffer is full at position `p` if it holds `buffer` tokens before `p`, so a segment has left it if and only if it
begins at least `buffer` tokens before `p`. This is known for each node of a window. What a node attends to follows from
the nodes before it that it sees: its own query and its parent's decide whether it is a boundary, and the entry of the
last boundary among them holds the choice. A round ends before a segment leaves the buffer that is partly in the round's
window.

The authors have published no code. The paper leaves open the number of sinks, the size of the buffer, the start and the
iterations of k-means, and whether the cluster that exceeds the budget is cut; these are options. Queries are compared
after rotation; the budget counts clusters and segments alone; the newest token of a prompt is the first one that
chooses. The memory for mean keys suffices for one segment per token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.cache.entry import AskedEntry, own_entry
from decodax.cache.key_values import FittedConfig, KVLayer
from decodax.caches.sparse.clusters import Clusters, cluster_places, prompt_clusters
from decodax.caches.sparse.reading import IndexedCache, SparseConfig, attention_at
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.window import each_node, take
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse

NEVER = jnp.iinfo(jnp.int32).max


@struct
class RetrievedLayer(Struct):
    """The clusters and segments that a layer can choose from, and its last choice, for one row or several.

    Attributes:
        clusters: clusters of the prompt.
        starts: `i32[..., N]`, positions at which segments begin; `NEVER`: no segment yet.
        newest: `i32[...]`, number of the segment that is being written.
        sums: `f32[..., G, N, d]`, sum of the keys of each segment.
        queries: `f32[..., H, d]`, queries of the latest token.
        chosen: `i32[..., G, n]`, the chosen positions; -1: none.
        buffer: static; number of tokens of the buffer.
    """

    clusters: Clusters
    starts: Array
    newest: Array
    sums: Array
    queries: Array
    chosen: Array
    buffer: int = static()

    @property
    def begun(self) -> Array:
        """`i32[...]`: position of the first token of the segment that the newest token belongs to."""
        return jnp.take_along_axis(self.starts, self.newest[..., None], -1)[..., 0]


@struct
class LouisKVEntry(AskedEntry):
    """Keys, values and queries (`f32`, not scaled) of a window's own nodes.

    Attributes:
        boundary: `bool[B, W]`, nodes that begin a segment.
        chosen: `i32[B, W, G, n]`, the slots that they choose; -1: none.
    """

    boundary: Array
    chosen: Array


@struct
class LouisKVCache(IndexedCache):
    """All tokens, and for each layer its clusters, segments and last choice.

    A token whose query differs from the one before is a boundary: it begins a segment and chooses clusters and segments
    anew. An entry holds key, value, query, whether the node is a boundary, and the positions that it chooses.

    Attributes:
        retrieved: the `RetrievedLayer` of each layer; None: the layer attends to all tokens.
        prompt: `i32[B]`, number of prefilled tokens.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    retrieved: tuple[RetrievedLayer | None, ...]
    prompt: Array

    if TYPE_CHECKING:
        kind: LouisKVConfig

    def max_commit(self) -> Array | None:
        begun = [held.begun for held in self.retrieved if held is not None]
        return functools.reduce(jnp.minimum, begun) + self.kind.buffer - self.length if begun else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        own, held = k.shape[1] - q.shape[1], self.retrieved[layer]
        entry = own_entry(q, k, v)
        if self.is_dense(layer, window.is_prefill):
            return self.attend_all(layer, q, k, v, window, scale=scale, sliding=sliding, softcap=softcap,
                                   bias=bias, sinks=sinks), entry
        assert held is not None
        if own and window.before is None:
            raise ValueError("cache: louiskv compares the queries of the tokens of a text; takes a method that does "
                             "not read a token twice")
        at, before, f32 = window.positions, window.before, q.astype(jnp.float32)
        with_before = lambda name, x: x if before is None else jnp.concatenate([getattr(before, name), x], 1)
        seen = jnp.broadcast_to(window.visible(), (*q.shape[:2], k.shape[1]))
        key_at = window.key_positions[:, None]
        parent = seen & (key_at == at[..., None] - 1)
        previous = jnp.where(parent.any(-1)[..., None, None], take(with_before("queries", f32), parent.argmax(-1)),
                             held.queries[:, None])
        boundary = (likeness(previous, f32) < self.kind.tau) | (at == self.prompt[:, None])
        choose = lambda: self._chosen(held, f32 * scale, at)
        chosen = lax.cond(boundary.any(), choose, lambda: jnp.full((*q.shape[:2], *held.chosen.shape[1:]), -1,
                                                                   jnp.int32))
        turned = seen & with_before("boundary", boundary)[:, None]
        last = jnp.where(turned, key_at, -1).argmax(-1)
        reads = jnp.where(turned.any(-1)[..., None, None], take(with_before("chosen", chosen), last),
                          held.chosen[:, None])
        near = window_attention_lse(q, k, v, window.visible(), at, scale=scale, key_positions=window.key_positions,
                                    sinks=sinks)
        each = jax.vmap(lambda kv, starts, newest, length, prompt, q, at, reads: self._read(
            layer, (kv, starts, newest, length, prompt), q, at, reads))
        rows = self.kv[layer], held.starts, held.newest, self.length, self.prompt
        out = merge(near, each_node(functools.partial(each, *rows), f32 * scale, at, reads))[0]
        return out, LouisKVEntry(entry.keys, entry.values, f32, boundary, chosen)

    def _chosen(self, held: RetrievedLayer, q: Array, at: Array) -> Array:
        """Returns the slots `i32[B, W, G, n]` that queries `f32[B, W, H, d]` at positions `i32[B, W]` choose."""
        each = jax.vmap(lambda own, q, at: chosen_slots(own, q, at, held.chosen.shape[-1], self.kind.cut))
        found: Array = each_node(functools.partial(each, held), q, at)
        return found

    def _read(self, layer: int, row: tuple[Array, ...], q: Array, at: Array, reads: Array) -> tuple[Array, Array]:
        """Returns attention of a query `f32[H, d]` of one row at position `at` (`i32[]`) to the sinks, to the slots
        `reads` (`i32[G, n]`) and to the buffer."""
        (kv, starts, newest, length, prompt), kind = row, self.kind
        (G, S, _), d = kv.shape, self.widths[layer]
        first = jnp.arange(min(kind.sinks, S), dtype=jnp.int32)
        inside = (jnp.arange(len(starts)) <= newest) & (at - starts < kind.buffer)
        since = jnp.where(inside, starts, NEVER).min()
        late = at - min(kind.buffer, S) + jnp.arange(min(kind.buffer, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.where(first < prompt, first, -1),
                                  jnp.where((late >= since) & (late < length), late, -1)])
        where = jnp.concatenate([jnp.broadcast_to(always, (G, len(always))), reads], 1)
        out, lse = attention_at(kv[None], q[None], where[None], d)
        return out[0], lse[0]

    def index(self, prompt: Dense) -> Self:
        kind, made = self.kind, []
        sinks = jnp.minimum(prompt.length, kind.sinks)
        number = jnp.maximum((prompt.length - sinks) // kind.cluster_size, 1)
        for layer, held in enumerate(self.retrieved):
            if held is not None:
                found = prompt_clusters(prompt, layer, sinks, number, kind.clusters(prompt.capacity), kind.seed,
                                        kind.iterations)
                found = lax.map(lambda row: with_means(*row), (found, prompt.keys(layer)))
                held = held.replace(clusters=found, starts=held.starts.at[:, 0].set(prompt.length))
            made.append(held)
        return self.replace(kv=prompt.kv, retrieved=tuple(made), prompt=prompt.length, length=prompt.length)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        new = super().commit(entries, slots)
        retrieved = tuple(None if held is None else self._grown(held, entry, slots, new.length)
                          for held, entry in zip(self.retrieved, entries, strict=True))
        return new.replace(retrieved=retrieved)

    def _grown(self, held: RetrievedLayer, entry: LouisKVEntry, slots: Array, length: Array) -> RetrievedLayer:
        """Returns the state of a layer after a commit at `slots`, after which the text has `length` (`i32[B]`)
        tokens."""
        wanted, none = slots >= 0, held.starts.shape[1]
        turned = wanted & entry.boundary
        begins = turned & (slots > held.begun[:, None])     # no second segment begins where one does
        earlier = begins[:, None] & (slots[:, None] <= slots[:, :, None])
        number = held.newest[:, None] + earlier.sum(-1, dtype=jnp.int32)
        put = jax.vmap(lambda starts, at, new: starts.at[at].set(new, mode="drop"))
        starts = put(held.starts, jnp.where(begins, number, none), slots)
        # token by token, so that sums do not depend on how many tokens came together
        add = jax.vmap(jax.vmap(lambda sums, at, new: sums.at[at].add(new, mode="drop"), in_axes=(0, None, 0)))
        sums = add(held.sums, jnp.where(wanted, number, none), entry.keys.astype(jnp.float32).swapaxes(1, 2))
        grown = held.replace(starts=starts, sums=sums, newest=held.newest + begins.sum(1, dtype=jnp.int32))
        # a segment that fills the buffer by itself ends there
        full = length - grown.begun >= self.kind.buffer
        newest = grown.newest + full
        starts = put(starts, jnp.where(full, newest, none)[:, None], length[:, None])
        last = lambda which, new, old: jnp.where(which.any(1).reshape(-1, *[1] * (old.ndim - 1)),
                                                 take(new, jnp.where(which, slots, -1).argmax(1)), old)
        return grown.replace(starts=starts, newest=newest, queries=last(wanted, entry.queries, held.queries),
                             chosen=last(turned, entry.chosen, held.chosen))


def likeness(one: Array, other: Array) -> Array:
    """Returns the mean over heads of the cosine of two queries `f32[..., H, d]`, `f32[...]`."""
    norms = jnp.linalg.norm(one, axis=-1) * jnp.linalg.norm(other, axis=-1)
    return ((one * other).sum(-1) / jnp.maximum(norms, 1e-12)).mean(-1)


def chosen_slots(held: RetrievedLayer, q: Array, at: Array, count: int, cut: bool) -> Array:
    """Returns the slots that each key head chooses for the queries of one token of a row, `i32[G, count]`; -1: none.

    Args:
        held: the clusters and segments of the row.
        q: `f32[H, d]`, the queries.
        at: `i32[]`, position of the token.
        count: number of slots.
        cut: see `cluster_places`.
    """
    (G, N, d), prompt, number = held.sums.shape, held.clusters, jnp.arange(len(held.starts))
    S = prompt.order.shape[-1]
    left = (number < held.newest) & (at - held.starts >= held.buffer)       # segments that have left the buffer
    sizes = jnp.where(left, jnp.append(held.starts[1:], 0) - held.starts, 0)
    means = jnp.concatenate([prompt.centroids, held.sums / jnp.maximum(sizes, 1)[:, None]], 1)
    of_all = lambda own, x: jnp.concatenate([own, jnp.broadcast_to(x, (G, N))], 1)
    sizes = of_all(prompt.sizes, sizes)
    scores = jnp.where(sizes[:, None] > 0, jnp.einsum("grd,gcd->grc", q.reshape(G, -1, d), means), -1e30)
    # the logarithm of the mean weight, in which small weights still differ
    worth = jax.nn.logsumexp(jax.nn.log_softmax(scores, axis=-1), axis=1, keepdims=True)
    starts = of_all(prompt.starts, S + jnp.where(left, held.starts, 0))
    place = cluster_places(sizes, starts, worth, count, cut)[:, 0]
    ordered = jnp.take_along_axis(prompt.order, jnp.clip(place, 0, S - 1), 1)
    return jnp.where(place < S, jnp.where(place < 0, -1, ordered), place - S)


def with_means(clusters: Clusters, keys: Array) -> Clusters:
    """Returns the clusters of a row with the means of their keys (`f[G, S, d]`) as centroids. The centroids of k-means
    are the means before its last assignment."""
    keys = keys.astype(jnp.float32)
    C, place = clusters.sizes.shape[1], jnp.arange(keys.shape[1])
    of = jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))(clusters.starts + clusters.sizes)
    own = jnp.take_along_axis(keys, clusters.order[..., None], 1)
    total = jax.vmap(lambda keys, of: jax.ops.segment_sum(keys, of, C + 1)[:C])(own, of)
    return clusters.replace(centroids=total / jnp.maximum(clusters.sizes, 1)[..., None])


@CACHES.register("louiskv", "LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences", "Wu et al. 2025",
                 family="sparse")
@dataclasses.dataclass(frozen=True)
class LouisKVConfig(FittedConfig, SparseConfig):
    """Keeps all tokens; where a query differs from the one before, heads choose clusters of the prompt and segments of
    the answer, to which tokens attend until the next such place.

    It suits long answers: queries of neighbouring tokens are mostly similar, and then nothing is chosen. It saves the
    time of attention, not memory. Example: `cache="louiskv:budget=512"`.

    Attributes:
        budget: number of tokens of clusters and segments that a head chooses.
        tau: a token is a boundary if the cosine of its query and the one before is below this.
        cluster_size: mean number of tokens of a cluster of the prompt.
        sinks: number of first tokens of a prompt, which are in no cluster and are always attended to.
        buffer: number of latest tokens after a prompt that are always attended to; segments leave the buffer as a
            whole.
        iterations: number of iterations of k-means.
        seed: seed of the random keys that k-means starts from.
        cut: True takes the earliest tokens of the first cluster or segment that does not fit into the budget. False
            takes none of it, and no later one.
        skip: numbers of layers that attend to all tokens.
    """

    budget: Count = 1024
    tau: float = 0.7
    cluster_size: Count = 16
    sinks: Whole = 4
    buffer: Count = 64
    iterations: Whole = 10
    seed: Whole = 0
    cut: bool = True
    skip: tuple[Whole, ...] = ()

    name: ClassVar[str] = "louiskv"

    def clusters(self, size: int) -> int:
        """Returns the maximum number of clusters of a prompt of `size` tokens."""
        return max((size - self.sinks) // self.cluster_size, 1)

    def segments(self, size: int) -> int:
        """Returns the maximum number of segments after a prompt, in texts of `size` tokens: one for each token, and one
        that is being written."""
        return self.new_tokens(size) + 1

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        N, n = self.segments(size), min(self.budget, size)
        zeros = lambda *rest, of=jnp.int32: jnp.zeros((batch, *rest), of)
        made: list[RetrievedLayer | None] = []
        for layer, shape in enumerate(shapes):
            G, d, f32 = shape.heads, shape.width, jnp.float32
            made.append(None if self.keeps_dense(layer, shape) else RetrievedLayer(
                clusters=Clusters.empty(batch, G, self.clusters(size), size, d),
                starts=jnp.full((batch, N), NEVER, jnp.int32).at[:, 0].set(0), newest=zeros(),
                sums=zeros(G, N, d, of=f32), queries=zeros(shape.queries or G, d, of=f32),
                chosen=jnp.full((batch, G, n), -1, jnp.int32), buffer=self.buffer))
        return LouisKVCache(retrieved=tuple(made), prompt=zeros(), **self.parts(shapes, batch, size, dtype, inputs))
