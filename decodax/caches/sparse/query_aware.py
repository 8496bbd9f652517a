"""Caches that keep everything and find what to read by codes of keys ("A2ATS: Retrieval-Based KV Cache Reduction via
Windowed Rotary Position Embedding and Query-Aware Vector Quantization", He et al., 2025).

A key, before its rotation, is written as the number of the nearest centroid. How near one is, queries say: with `H` the
mean of `q^T q` over queries of a head and `H = L L^T`, the squared distance of `k L` to `c L` is the mean squared error
of their products with `k`, if `c` stands in its place. `decodax.train.fit_key_books` finds centroids and factors.

What a query may find in a token is its product with the token's centroid, as if all tokens stood at one distance from
it (windowed rotary position embedding): the positions of far tokens then take no part in the choice, and a query's
products with all centroids are all there is to compute. Each query head takes the tokens of largest products, and a
group of heads reads those that any of its heads has taken, with their keys and values as they are, and beside them the
first tokens and those of the latest `recent` positions.

A code depends on its own key alone, and the latest positions are read in any case, so that it does not matter which of
them a round has committed. Prompts are read whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.caches.constant import Constant
from decodax.caches.evict.selection import kept
from decodax.caches.quantize.cq import nearest
from decodax.caches.rotation import rotated, turned
from decodax.caches.sparse.retrieval import attention_to
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention, window_attention_lse


@dataclasses.dataclass(frozen=True)
class KeyBooks:
    """The codebook of each head of keys of a model.

    Attributes:
        centroids: `f32[L, G, C, d]`, keys before their rotation. factors: `f32[L, G, d, d]`, the `L` of the metric.
    """

    centroids: Constant
    factors: Constant

    def __post_init__(self) -> None:
        sizes, factors = self.centroids.value.shape, self.factors.value.shape
        if len(sizes) != 4 or factors != (*sizes[:2], sizes[3], sizes[3]):
            raise ValueError(f"books: got centroids {self.centroids} and factors {self.factors}, takes f32[L, G, C, d] "
                             "and f32[L, G, d, d]")

    def codes(self, layer: int, keys: Array) -> Array:
        """`i32[G, n]`: which centroids are nearest to keys `f[G, n, d]` before their rotation."""
        factors = self.factors.value[layer]
        centroids = np.einsum("gcd,gde->gce", self.centroids.value[layer], factors)
        return nearest(jnp.einsum("gnd,gde->gne", keys.astype(jnp.float32), factors), centroids[:, None])[..., 0]


@struct
class FindingByCodes(KeyValues):
    """Everything, in the order of positions, with the codes of keys.

    Attributes:
        kv, given, widths: see `KeyValues`. codes: a tuple of one `u16[B, G, S, 1]` a layer; None where a layer reads
            everything.
        length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    codes: tuple[Array | None, ...]
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: ByCodes = static()

    supports = frozenset({"trees"})

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own, kind, shape = k.shape[1] - q.shape[1], self.kind, self.shapes[layer]
        entry = k[:, own:], v[:, own:]
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, key_positions=window.key_positions)
        if window.certain or self.codes[layer] is None:
            return window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.length,
                                    sliding=sliding, bias=bias, **options), entry
        if bias is not None or softcap is not None:
            raise ValueError(f"cache: {kind.name} scores tokens by queries and keys alone; takes a model without a "
                             "soft cap or a bias of its attention scores")
        if k.shape[1] > kind.recent:
            raise ValueError(f"cache: {kind.name} takes windows of at most its {kind.recent} recent tokens, got one of "
                             f"{k.shape[1]} nodes; takes recent={k.shape[1]} or more")
        near = window_attention_lse(q, k, v, window.visible(), window.positions, **options)
        at = window.positions
        far = rotated(shape, turned(shape, q.astype(jnp.float32), -at), jnp.full_like(at, kind.distance))
        each = jax.vmap(lambda kv, codes, length, q, far, at: self._read(layer, kv, codes, length, q, far, at))
        read = functools.partial(each, self.kv[layer], self.codes[layer], self.length)
        return merge(near, each_node(read, q.astype(jnp.float32) * scale, far, at))[0], entry

    def _read(self, layer: int, kv: Array, codes: Array, length: Array, q: Array, far: Array,
              at: Array) -> tuple[Array, Array]:
        """Attention of a query `f32[H, d]` at `at` (`i32[]`) of one row to what it reads of the cache; `far`: the query
        at the distance that scores are of."""
        kind, G, d, S = self.kind, kv.shape[0], self.widths[layer], self.capacity
        near = min(kind.recent, S)
        first = jnp.clip(at - kind.recent + 1, 0, S - near)
        late = first + jnp.arange(near, dtype=jnp.int32)
        early = jnp.arange(min(kind.sinks, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.where(early < length, early, -1),
                                  jnp.where((late >= kind.sinks) & (late > at - kind.recent) & (late < length), late,
                                            -1)])
        taken = self._taken(layer, codes, far.reshape(G, -1, d), at)
        where = jnp.concatenate([jnp.broadcast_to(always, (G, len(always))), taken], 1)
        some = jnp.take_along_axis(kv, jnp.maximum(where, 0)[..., None], 1).astype(jnp.float32)
        return attention_to(q.reshape(G, -1, d), some, where >= 0, d)

    def _taken(self, layer: int, codes: Array, far: Array, at: Array) -> Array:
        """`i32[G, n]`: the positions that the queries `f32[G, r, d]` of each head take; -1: there are no more."""
        kind, S, (G, r, _) = self.kind, self.capacity, far.shape
        table = kept(kind.budget, S)
        worth = jnp.einsum("grd,gcd->grc", far, self.kind.books.centroids.value[layer])
        which = jnp.broadcast_to(codes[:, None, :, 0].astype(jnp.int32), (G, r, S))
        slots = jnp.arange(S, dtype=jnp.int32)
        there = (slots >= kind.sinks) & (slots <= at - kind.recent)
        found, best = lax.top_k(jnp.where(there, jnp.take_along_axis(worth, which, 2), -jnp.inf), int(table.max()))
        number = jnp.asarray(table)[jnp.minimum(at + 1, S)]
        best = jnp.where((found > -jnp.inf) & (jnp.arange(best.shape[-1]) < number), best, S).reshape(G, -1)
        # what several heads of a group take counts once
        order = jnp.arange(best.shape[1], dtype=jnp.int32)
        owner = jax.vmap(lambda best: jnp.full(S, len(order), jnp.int32).at[best].min(order, mode="drop"))(best)
        once = jnp.take_along_axis(owner, jnp.minimum(best, S - 1), 1) == order
        return jnp.where((best < S) & once, best, -1)

    def commit(self, entries: Entries, slots: Array) -> FindingByCodes:
        if not self.kv:
            return self
        kv, codes = [], []
        for layer, (held, own, entry) in enumerate(zip(self.kv, self.codes, entries, strict=True)):
            kv.append(write(held, jnp.concatenate(entry, -1), slots))
            if own is not None:
                keys = turned(self.shapes[layer], entry[0].astype(jnp.float32), -slots).swapaxes(1, 2)
                new = jax.vmap(lambda keys, layer=layer: self.kind.books.codes(layer, keys))(keys)
                own = write(own, new.swapaxes(1, 2)[..., None].astype(own.dtype), slots)
            codes.append(own)
        return self.replace(kv=tuple(kv), codes=tuple(codes), length=jnp.maximum(self.length, slots.max(1) + 1))


@dataclasses.dataclass(frozen=True)
class ByCodes(CacheConfig):
    """A `FindingByCodes` cache.

    Attributes:
        books: centroids and metrics. budget: tokens that each query head takes, or (below 1) their share of the text so
            far. sinks: the first tokens, which are read in any case. recent: the latest positions, which are, too.
        distance: in tokens, at which all keys stand for the scores; one that the model was trained on.
        skip: layers that read everything.
        name: what errors call it.
    """

    books: KeyBooks
    budget: int | float = 0.03
    sinks: int = 8
    recent: int = 64
    distance: int = 2048
    skip: tuple[int, ...] = ()
    name: str = "a2ats"

    def __post_init__(self) -> None:
        whole = isinstance(self.budget, int) and self.budget >= 1
        if not whole and not (isinstance(self.budget, float) and 0 < self.budget < 1):
            raise ValueError(f"budget: got {self.budget!r}, takes a number of tokens from 1 or a share between 0 and 1")
        if not isinstance(self.recent, int) or self.recent < 1:
            raise ValueError(f"recent: got {self.recent!r}, takes a number of tokens from 1")
        if self.sinks < 0 or self.distance < 0:
            raise ValueError(f"sinks, distance: got {self.sinks} and {self.distance}, takes 0 or more")

    def _check(self, layer: int, shape: KVLayer) -> None:
        """Raises ValueError where the codebooks are not those of this model."""
        L, G, _, d = self.books.centroids.value.shape
        if layer >= L or (G, d) != (shape.heads, shape.width):
            raise ValueError(f"books: got those of {L} layers of {G} heads of {d}, layer {layer} of the model has "
                             f"{shape.heads} heads of {shape.width}")

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        codes: list[Array | None] = []
        small = self.books.centroids.value.shape[2] <= 1 << 16
        for layer, shape in enumerate(shapes):
            whole = layer in self.skip or shape.sliding is not None
            if not whole:
                self._check(layer, shape)
            codes.append(None if whole else jnp.zeros((batch, shape.heads, capacity, 1),
                                                      jnp.uint16 if small else jnp.int32))
        return FindingByCodes(kv=empty_kv(shapes, batch, capacity, dtype), codes=tuple(codes),
                              length=jnp.zeros(batch, jnp.int32), given=inputs, widths=key_widths(shapes),
                              shapes=shapes, kind=self)
