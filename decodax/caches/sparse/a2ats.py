"""A2ATS: each query finds the tokens that it attends to by vector-quantized keys ("A2ATS: Retrieval-Based KV Cache
Reduction via Windowed Rotary Position Embedding and Query-Aware Vector Quantization", He et al., 2025).

The code of a key, before rotation, is the number of the nearest centroid. The metric depends on the queries: with `H`
the mean of `q^T q` over the queries of a head and `H = L L^T`, the squared distance of `k L` and `c L` is the mean
squared error of the products of queries with `k` if it is replaced by `c`. `decodax.train.fit_key_books` fits centroids
and factors.

The score of a token is the product of the query with the token's centroid, as if all tokens were at one distance from
the query (windowed rotary position embedding). So positions of far tokens do not influence the choice, and only
products with the centroids have to be computed. Each query head takes the tokens with the highest scores. The heads of
a group attend to all tokens that one of them has taken, to the first tokens, and to the latest `recent` positions.

A code depends on its own key alone, and the latest positions are always attended to, so it does not matter which of
them are committed. Prompts are prefilled with full attention.

Codes and outputs are those of the authors' code (71f10b0). Of tokens with one centroid the earlier ones are taken.
The newest token of a prompt chooses as well; there it uses full attention. Keys are not offloaded.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KVLayer
from decodax.caches.configs import taken
from decodax.caches.constant import Constant
from decodax.caches.evict.selection import kept
from decodax.caches.quantize.cq import nearest
from decodax.caches.rotation import rotated, turned
from decodax.caches.sparse.reading import SparseCache, SparseConfig
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree


@dataclasses.dataclass(frozen=True)
class KeyBooks:
    """Codebooks for the vector quantization of a model's keys, one with `C` centroids for each head.

    Attributes:
        centroids: `f32[L, G, C, d]`, centroids of keys before rotation.
        factors: `f32[L, G, d, d]`. The distance of a key `k` to a centroid `c` is the norm of `(k - c) factors[layer,
            head]`, which weights directions by how much the queries use them.
    """

    centroids: Constant
    factors: Constant

    def __post_init__(self) -> None:
        sizes, factors = self.centroids.value.shape, self.factors.value.shape
        if len(sizes) != 4 or factors != (*sizes[:2], sizes[3], sizes[3]):
            raise ValueError(f"books: got centroids {self.centroids} and factors {self.factors}, takes f32[L, G, C, d] "
                             "and f32[L, G, d, d]")

    def codes(self, layer: int, keys: Array) -> Array:
        """Returns the index of the nearest centroid for each key of a layer, `i32[G, n]`.

        Args:
            layer: number of the layer.
            keys: `f[G, n, d]`, keys before rotation.
        """
        factors = self.factors.value[layer]
        centroids = np.einsum("gcd,gde->gce", self.centroids.value[layer], factors)
        return nearest(jnp.einsum("gnd,gde->gne", keys.astype(jnp.float32), factors), centroids[:, None])[..., 0]


@struct
class A2ATSCache(SparseCache):
    """All tokens, with the codes of their keys.

    Attributes:
        codes: for each layer `u16[B, G, S, 1]`; None: the layer attends to all tokens.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    codes: tuple[Array | None, ...]

    if TYPE_CHECKING:
        kind: A2ATSConfig

    def select_slots(self, layer: int, q: Array, positions: Array) -> Array:
        shape, at = self.shapes[layer], positions[:, None]
        far = rotated(shape, turned(shape, q[:, None], -at), jnp.full_like(at, self.kind.distance))[:, 0]
        one = lambda codes, length, far, at: self._slots(layer, codes, length, far, at)
        return jax.vmap(one)(self.codes[layer], self.length, far, positions)

    def _slots(self, layer: int, codes: Array, length: Array, far: Array, at: Array) -> Array:
        """Returns the slots that the query of one row at position `at` (`i32[]`) attends to, `i32[G, n]`. `far` is the
        query rotated to the distance for which scores are computed, `f32[H, d]`."""
        kind, G, S = self.kind, self.shapes[layer].heads, self.capacity
        near = min(kind.recent, S)
        first = jnp.clip(at - kind.recent + 1, 0, S - near)
        late = first + jnp.arange(near, dtype=jnp.int32)
        early = jnp.arange(min(kind.sinks, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.where(early < length, early, -1),
                                  jnp.where((late >= kind.sinks) & (late > at - kind.recent) & (late < length), late,
                                            -1)])
        found = self._found(layer, codes, far.reshape(G, -1, far.shape[-1]), at)
        return jnp.concatenate([jnp.broadcast_to(always, (G, len(always))), found], 1)

    def _found(self, layer: int, codes: Array, far: Array, at: Array) -> Array:
        """Returns the slots that the queries `far` (`f32[G, r, d]`) of each head take by their codes, `i32[G, n]`; -1:
        none."""
        kind, S, (G, r, _) = self.kind, self.capacity, far.shape
        table = kept(kind.budget, S)
        worth = jnp.einsum("grd,gcd->grc", far, self.kind.books.centroids.value[layer])
        which = jnp.broadcast_to(codes[:, None, :, 0].astype(jnp.int32), (G, r, S))
        slots = jnp.arange(S, dtype=jnp.int32)
        there = (slots >= kind.sinks) & (slots <= at - kind.recent)
        found, best = lax.top_k(jnp.where(there, jnp.take_along_axis(worth, which, 2), -jnp.inf), int(table.max()))
        number = jnp.asarray(table)[jnp.minimum(at + 1, S)]
        best = jnp.where((found > -jnp.inf) & (jnp.arange(best.shape[-1]) < number), best, S).reshape(G, -1)
        # a token that several heads of a group take is read once
        order = jnp.arange(best.shape[1], dtype=jnp.int32)
        owner = jax.vmap(lambda best: jnp.full(S, len(order), jnp.int32).at[best].min(order, mode="drop"))(best)
        once = jnp.take_along_axis(owner, jnp.minimum(best, S - 1), 1) == order
        return jnp.where((best < S) & once, best, -1)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        codes = []
        for layer, (own, entry) in enumerate(zip(self.codes, entries, strict=True)):
            if own is not None:
                keys = turned(self.shapes[layer], entry.keys.astype(jnp.float32), -slots).swapaxes(1, 2)
                new = jax.vmap(lambda keys, layer=layer: self.kind.books.codes(layer, keys))(keys)
                own = write(own, new.swapaxes(1, 2)[..., None].astype(own.dtype), slots)
            codes.append(own)
        return super().commit(entries, slots).replace(codes=tuple(codes))


@CACHES.register("a2ats", "A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and "
                 "Query-Aware Vector Quantization", "He et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True)
class A2ATSConfig(SparseConfig):
    """Keeps all tokens; each query attends to the tokens whose quantized keys have the largest products with it, the
    first tokens and the latest.

    Codebooks are fitted once for a model: `books = decodax.train.fit_key_books(lm, texts)`. The cache saves the time of
    attention to long texts, not memory. Example: `cache=caches.a2ats(books, budget=0.1)`.

    Attributes:
        books: centroids and metrics of the model's keys.
        budget: number of tokens that each query head takes; below 1, their share of the text so far.
        sinks: number of first tokens that are always attended to.
        recent: number of latest positions that are always attended to; no window may be wider.
        distance: distance in tokens for which scores are computed, whatever the positions of keys; it should be within
            the trained context.
        skip: numbers of layers that attend to all tokens.
    """

    books: KeyBooks = None      # type: ignore[assignment]
    budget: int | float = 0.03
    sinks: Whole = 8
    recent: Count = 64
    distance: Whole = 2048
    skip: tuple[Whole, ...] = ()

    name: ClassVar[str] = "a2ats"

    def __post_init__(self) -> None:
        taken("books", self.books, KeyBooks, "what decodax.train.fit_key_books measures on a model")
        super().__post_init__()
        whole = isinstance(self.budget, int) and self.budget >= 1
        if not whole and not (isinstance(self.budget, float) and 0 < self.budget < 1):
            raise ValueError(f"budget: got {self.budget!r}, takes a number of tokens from 1 or a share between 0 and 1")

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        L, G, C, d = self.books.centroids.value.shape
        codes: list[Array | None] = []
        for layer, shape in enumerate(shapes):
            whole = self.keeps_dense(layer, shape)
            if not whole and (layer >= L or (G, d) != (shape.heads, shape.width)):
                raise ValueError(f"books: got those of {L} layers of {G} heads of {d}, layer {layer} of the model has "
                                 f"{shape.heads} heads of {shape.width}")
            codes.append(None if whole else jnp.zeros((batch, shape.heads, size, 1),
                                                      jnp.uint16 if C <= 1 << 16 else jnp.int32))
        return A2ATSCache(codes=tuple(codes), **self.parts(shapes, batch, size, dtype, inputs))
