"""A cache that chooses anew what is read where the text turns to something else ("LouisKV: Efficient KV Cache Retrieval
for Long Input-Output Sequences", Wu et al., 2025).

Behind a prompt the keys of each head are clustered, all but the first tokens, the sinks. While decoding, each layer
compares a token's queries with those of the token before by the mean cosine of all heads, `r`. Where `r < tau` the
token is a boundary: a new segment begins with it, and each head of keys chooses clusters and segments by the softmax of
its queries over their mean keys, in the mean over its queries, best first until the budget is full. Until the next
boundary, tokens read what was chosen there, the sinks, and the latest tokens: those of the buffer. A segment is one of
those to choose from when the buffer is full and it is the oldest one there; none is ever clustered.

The buffer is full at `p` when it holds `buffer` tokens before `p`, so a segment has left it exactly where it begins
`buffer` tokens or more before `p`. That is known of every node of a window. What a node reads is told by the nodes
before it that it sees: whether a node is a boundary by its own query and its parent's, and what is read by the last
boundary among them, whose choice its entry holds. A round ends before a segment of which a part stands in its own
window would leave the buffer.
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
from decodax.caches.sparse.clusters import Clusters, clustered, drawn, places_of
from decodax.caches.sparse.retrieval import attention_to
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import each_node, take
from decodax.pallas_kernels.window_attention import BLOCK, Bias, merge, window_attention, window_attention_lse

NEVER = jnp.iinfo(jnp.int32).max


@struct
class RetrievedLayer(Struct):
    """What a layer can choose from, and what it has chosen, of one row or of several.

    Attributes:
        clusters: those of the prompt.
        starts: `i32[..., N]`, the positions at which segments begin; `NEVER`: there is none yet. newest: `i32[...]`,
            the number of the one that is being written. sums: `f32[..., G, N, d]`, of the keys of each segment.
        queries: `f32[..., H, d]`, those of the latest token. chosen: `i32[..., G, n]`, positions; -1: none.
    """

    clusters: Clusters
    starts: Array
    newest: Array
    sums: Array
    queries: Array
    chosen: Array

    @property
    def begun(self) -> Array:
        """`i32[...]`: where the segment begins that is being written."""
        return jnp.take_along_axis(self.starts, self.newest[..., None], -1)[..., 0]


@struct
class BoundaryRetrieval(KeyValues):
    """Everything, in the order of positions, and for each layer what it chooses from and has chosen.

    Attributes:
        kv, given, widths: see `KeyValues`. retrieved: a tuple of one `RetrievedLayer` a layer; None where a layer reads
            everything.
        prompt: `i32[B]`, how many tokens there were when the prompt was in. length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    retrieved: tuple[RetrievedLayer | None, ...]
    prompt: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: AtBoundaries = static()

    supports = frozenset({"trees"})

    def horizon(self) -> Array | None:
        begun = [held.begun for held in self.retrieved if held is not None]
        return functools.reduce(jnp.minimum, begun) + self.kind.buffer - self.length if begun else None

    def for_prompt(self) -> Cache:
        if not self.kv:
            return self
        whole = dense(self.shapes, self.length.shape[0], self.capacity, self.kv[0].dtype, self.given)
        return PromptToRetrieve(base=whole, shapes=self.shapes, kind=self.kind)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own, held = k.shape[1] - q.shape[1], self.retrieved[layer]
        entry = k[:, own:], v[:, own:]
        given, at = (q, k, v, window.visible(), window.positions), window.positions
        options: dict[str, Any] = dict(scale=scale, key_positions=window.key_positions)
        if held is None:
            return window_attention(*given, self.kv[layer], self.length, sliding=sliding, softcap=softcap, bias=bias,
                                    **options), entry
        if window.certain or bias is not None or softcap is not None:
            raise ValueError("cache: louiskv reads a prompt as a whole, which only the model that answers does, and "
                             "takes no bias and no soft cap of the scores; give a draft model another cache")
        if own and window.before is None:
            raise ValueError("cache: louiskv compares the queries of the tokens of a text; takes a model and a method "
                             "that read each token once, by its own key")
        before, f32 = window.before, q.astype(jnp.float32)
        behind = lambda i, x: x if before is None else jnp.concatenate([before[i], x], 1)
        seen = jnp.broadcast_to(window.visible(), (*q.shape[:2], k.shape[1]))
        key_at = window.key_positions[:, None]
        parent = seen & (key_at == at[..., None] - 1)
        previous = jnp.where(parent.any(-1)[..., None, None], take(behind(2, f32), parent.argmax(-1)),
                             held.queries[:, None])
        boundary = (likeness(previous, f32) < self.kind.tau) | (at == self.prompt[:, None])
        choose = lambda: self._chosen(held, f32 * scale, at)
        chosen = lax.cond(boundary.any(), choose, lambda: jnp.full((*q.shape[:2], *held.chosen.shape[1:]), -1,
                                                                   jnp.int32))
        turned = seen & behind(3, boundary)[:, None]
        last = jnp.where(turned, key_at, -1).argmax(-1)
        reads = jnp.where(turned.any(-1)[..., None, None], take(behind(4, chosen), last), held.chosen[:, None])
        near = window_attention_lse(*given, **options)
        each = jax.vmap(lambda kv, starts, newest, length, prompt, q, at, reads: self._read(
            layer, (kv, starts, newest, length, prompt), q, at, reads))
        rows = self.kv[layer], held.starts, held.newest, self.length, self.prompt
        out = merge(near, each_node(functools.partial(each, *rows), f32 * scale, at, reads))[0]
        return out, (*entry, f32, boundary, chosen)

    def _chosen(self, held: RetrievedLayer, q: Array, at: Array) -> Array:
        """`i32[B, W, G, n]`: what queries `f32[B, W, H, d]` at positions `i32[B, W]` choose."""
        each = jax.vmap(lambda own, q, at: chosen(own, q, at, held.chosen.shape[-1], self.kind))
        found: Array = each_node(functools.partial(each, held), q, at)
        return found

    def _read(self, layer: int, row: tuple[Array, ...], q: Array, at: Array, reads: Array) -> tuple[Array, Array]:
        """Attention of a query `f32[H, d]` at `at` (`i32[]`) of one row to the sinks, to what is `reads` (`i32[G, n]`)
        and to the buffer."""
        (kv, starts, newest, length, prompt), kind = row, self.kind
        (G, S, _), d = kv.shape, self.widths[layer]
        first = jnp.arange(min(kind.sinks, S), dtype=jnp.int32)
        inside = (jnp.arange(len(starts)) <= newest) & (at - starts < kind.buffer)
        since = jnp.where(inside, starts, NEVER).min()
        late = at - min(kind.buffer, S) + jnp.arange(min(kind.buffer, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.where(first < prompt, first, -1),
                                  jnp.where((late >= since) & (late < length), late, -1)])
        where = jnp.concatenate([jnp.broadcast_to(always, (G, len(always))), reads], 1)
        n = where.shape[1]
        where = jnp.pad(where, ((0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)
        some = jnp.take_along_axis(kv, jnp.maximum(where, 0)[..., None], 1).astype(jnp.float32)
        return attention_to(q.reshape(G, -1, d), some, where >= 0, d)

    def commit(self, entries: Entries, slots: Array) -> BoundaryRetrieval:
        if not self.kv:
            return self
        kv = tuple(write(held, jnp.concatenate(entry[:2], -1), slots)
                   for held, entry in zip(self.kv, entries, strict=True))
        length = jnp.maximum(self.length, slots.max(1) + 1)
        retrieved = tuple(None if held is None else self._grown(held, entry, slots, length)
                          for held, entry in zip(self.retrieved, entries, strict=True))
        return self.replace(kv=kv, retrieved=retrieved, length=length)

    def _grown(self, held: RetrievedLayer, entry: Any, slots: Array, length: Array) -> RetrievedLayer:
        k, _, queries, boundary, chosen = entry
        wanted, none = slots >= 0, held.starts.shape[1]
        turned = wanted & boundary
        begins = turned & (slots > held.begun[:, None])     # where a segment begins already, no other one does
        earlier = begins[:, None] & (slots[:, None] <= slots[:, :, None])
        number = held.newest[:, None] + earlier.sum(-1, dtype=jnp.int32)
        put = jax.vmap(lambda starts, at, new: starts.at[at].set(new, mode="drop"))
        starts = put(held.starts, jnp.where(begins, number, none), slots)
        # one after the other, so that sums do not depend on how many tokens came together
        add = jax.vmap(jax.vmap(lambda sums, at, new: sums.at[at].add(new, mode="drop"), in_axes=(0, None, 0)))
        sums = add(held.sums, jnp.where(wanted, number, none), k.astype(jnp.float32).swapaxes(1, 2))
        grown = held.replace(starts=starts, sums=sums, newest=held.newest + begins.sum(1, dtype=jnp.int32))
        # one that fills the buffer by itself ends there
        full = length - grown.begun >= self.kind.buffer
        newest = grown.newest + full
        starts = put(starts, jnp.where(full, newest, none)[:, None], length[:, None])
        last = lambda which, new, old: jnp.where(which.any(1).reshape(-1, *[1] * (old.ndim - 1)),
                                                 take(new, jnp.where(which, slots, -1).argmax(1)), old)
        return grown.replace(starts=starts, newest=newest, queries=last(wanted, queries, held.queries),
                             chosen=last(turned, chosen, held.chosen))


def likeness(one: Array, other: Array) -> Array:
    """`f32[...]`: the mean over heads of the cosines of queries `f32[..., H, d]`."""
    norms = jnp.linalg.norm(one, axis=-1) * jnp.linalg.norm(other, axis=-1)
    return ((one * other).sum(-1) / jnp.maximum(norms, 1e-12)).mean(-1)


def chosen(held: RetrievedLayer, q: Array, at: Array, count: int, kind: AtBoundaries) -> Array:
    """`i32[G, count]`: the positions that each head of keys chooses for queries `f32[H, d]` at `at` (`i32[]`) of a row;
    -1: there are no more."""
    (G, N, d), prompt, number = held.sums.shape, held.clusters, jnp.arange(len(held.starts))
    S = prompt.order.shape[-1]
    left = (number < held.newest) & (at - held.starts >= kind.buffer)       # segments that have left the buffer
    sizes = jnp.where(left, jnp.append(held.starts[1:], 0) - held.starts, 0)
    means = jnp.concatenate([prompt.centroids, held.sums / jnp.maximum(sizes, 1)[:, None]], 1)
    of_all = lambda own, x: jnp.concatenate([own, jnp.broadcast_to(x, (G, N))], 1)
    sizes = of_all(prompt.sizes, sizes)
    scores = jnp.where(sizes[:, None] > 0, jnp.einsum("grd,gcd->grc", q.reshape(G, -1, d), means), -1e30)
    # the logarithm of their mean weight, in which small weights differ, too
    worth = jax.nn.logsumexp(jax.nn.log_softmax(scores, axis=-1), axis=1, keepdims=True)
    starts = of_all(prompt.starts, S + jnp.where(left, held.starts, 0))
    place = places_of(sizes, starts, worth, count, kind.cut)[:, 0]
    ordered = jnp.take_along_axis(prompt.order, jnp.clip(place, 0, S - 1), 1)
    return jnp.where(place < S, jnp.where(place < 0, -1, ordered), place - S)


@struct
class PromptToRetrieve(Wrapper):
    """A prompt whose keys will be clustered."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: AtBoundaries = static()

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base, kind = self.base, self.kind
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        sinks = jnp.minimum(base.length, kind.sinks)
        number = jnp.maximum((base.length - sinks) // kind.per, 1)
        most = kind.clusters(base.capacity)
        made: list[RetrievedLayer | None] = []
        for held, kv, d in zip(into.retrieved, base.kv, base.widths, strict=True):
            if held is None:
                made.append(None)
                continue

            def one(row: Any, d: int = d) -> Clusters:
                kv, start, length, number = row
                keys = kv[..., :d].astype(jnp.float32)
                return means(clustered(keys, start, length, drawn(kind.seed, start, length, number, most), kind.loops),
                             keys)

            clusters = lax.map(one, (kv, sinks, base.length, number))
            made.append(held.replace(clusters=clusters, starts=held.starts.at[:, 0].set(base.length)))
        return into.replace(kv=base.kv, retrieved=tuple(made), prompt=base.length, length=base.length)


def means(clusters: Clusters, keys: Array) -> Clusters:
    """The clusters of a row with the means of their keys (`f32[G, S, d]`) for centroids, whatever k-means ended
    with."""
    C, place = clusters.sizes.shape[1], jnp.arange(keys.shape[1])
    of = jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))(clusters.starts + clusters.sizes)
    own = jnp.take_along_axis(keys, clusters.order[..., None], 1)
    total = jax.vmap(lambda keys, of: jax.ops.segment_sum(keys, of, C + 1)[:C])(own, of)
    return clusters.replace(centroids=total / jnp.maximum(clusters.sizes, 1)[..., None])


@dataclasses.dataclass(frozen=True)
class AtBoundaries(CacheConfig):
    """A `BoundaryRetrieval` cache.

    Attributes:
        budget: tokens of clusters and segments that a head chooses. tau: how unlike queries are at a boundary.
        per: tokens of a prompt to one cluster. sinks: the first tokens of a prompt, which are in none.
        buffer: the latest tokens behind a prompt, of which whole segments leave.
        loops: of k-means. seed: which keys it begins with.
        cut: whether the first cluster or segment that is too large for what is left of the budget gives its earliest
            tokens; else it gives none, and nothing behind it does.
        skip: layers that read everything. new: how many tokens there will be behind the prompt at most (`fit`); None:
            not known.
    """

    budget: int = 1024
    tau: float = 0.7
    per: int = 16
    sinks: int = 4
    buffer: int = 64
    loops: int = 10
    seed: int = 0
    cut: bool = True
    skip: tuple[int, ...] = ()
    new: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "per", "buffer"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.sinks < 0 or self.loops < 0:
            raise ValueError(f"sinks, loops: got {self.sinks} and {self.loops}, takes 0 or more")

    def fit(self, new: int) -> AtBoundaries:
        return dataclasses.replace(self, new=new)

    def clusters(self, size: int) -> int:
        """The most clusters of a prompt of so many tokens."""
        return max((size - self.sinks) // self.per, 1)

    def segments(self, size: int) -> int:
        """The most segments behind a prompt, in texts of so many tokens: one a token, and one to be written."""
        return (size if self.new is None else min(self.new, size)) + 1

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any,
              inputs: PyTree) -> BoundaryRetrieval:
        """An empty cache."""
        C, N, n = self.clusters(size), self.segments(size), min(self.budget, size)
        zeros = lambda *rest, of=jnp.int32: jnp.zeros((batch, *rest), of)
        made: list[RetrievedLayer | None] = []
        for layer, shape in enumerate(shapes):
            G, d, f32 = shape.heads, shape.width, jnp.float32
            whole = layer in self.skip or shape.sliding is not None
            made.append(None if whole else RetrievedLayer(
                clusters=Clusters(centroids=zeros(G, C, d, of=f32), sizes=zeros(G, C), starts=zeros(G, C),
                                  order=zeros(G, size)),
                starts=jnp.full((batch, N), NEVER, jnp.int32).at[:, 0].set(0), newest=zeros(),
                sums=zeros(G, N, d, of=f32), queries=zeros(shape.queries or G, d, of=f32),
                chosen=jnp.full((batch, G, n), -1, jnp.int32)))
        return BoundaryRetrieval(kv=empty_kv(shapes, batch, size, dtype), retrieved=tuple(made), prompt=zeros(),
                                 length=zeros(), given=inputs, widths=key_widths(shapes), shapes=shapes, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
