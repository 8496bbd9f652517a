"""Sparse caches that are divided into pages of tokens; each query attends to a few pages.

A page is represented by a digest: a few numbers for each head. A query scores all digests and attends to the pages with
the highest scores; the rest of the cache is not loaded. Prompts are prefilled with full attention. The page that is
being filled and the latest `recent` tokens are always attended to. So it does not matter which of them are committed
and which are in the window, and a round of drafts gives the same result as plain decoding. No page is ever evicted.

The pages may be in host memory (`decodax.caches.sparse.host_pages`); digests and the latest tokens are always on the
device.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KVLayer
from decodax.caches.sparse.reading import SparseCache, SparseConfig, attention_to
from decodax.common.options import Count, Whole
from decodax.common.struct import struct
from decodax.core.cache import Entries, PyTree
from decodax.core.window import each_node


class PageScore(abc.ABC):
    """Base of rules that compute digests and scores of pages. Derive a frozen dataclass, and use it as the `score` of a
    `PageConfig`."""

    @abc.abstractmethod
    def digest(self, keys: Array) -> Array:
        """Returns a summary (digest) of each page, `f[..., m]`, from its keys, `f[..., P, d]`. Scores of pages are
        computed from digests alone."""

    @abc.abstractmethod
    def __call__(self, q: Array, digests: Array) -> Array:
        """Returns the scores `f32[G, r, N]` of pages with digests `f[G, N, m]` for queries `f[G, r, d]`."""


@struct
class PageCache(SparseCache):
    """Keys and values of all tokens, with a digest of each full page.

    Attributes:
        digests: for each layer `f[B, G, S / P, m]`.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    digests: tuple[Array, ...]

    if TYPE_CHECKING:
        kind: PageConfig

    @property
    def capacity(self) -> int:
        return self.digests[0].shape[2] * self.kind.page_size if self.digests else 0

    def is_dense(self, layer: int, is_prefill: bool) -> bool:
        return super().is_dense(layer, is_prefill) or not self.kind.is_sparse(self.capacity)

    def read(self, layer: int, q: Array, positions: Array) -> tuple[Array, Array]:
        shape = self.shapes[layer]

        def one(q: Array, at: Array) -> tuple[Array, Array]:
            pages, found = self.choose(layer, q, at)
            latest, late = self.always_read(layer, at, self.length)
            some = jnp.concatenate([self.pages_of(layer, pages, found), latest], 2)
            seen = jnp.concatenate([jnp.repeat(found, self.kind.page_size, 2), late], 2)
            attend = jax.vmap(lambda q, some, seen: attention_to(q, some, seen, shape.width))
            return attend(q.reshape(len(q), shape.heads, -1, shape.width), some.astype(jnp.float32), seen)

        found: tuple[Array, Array] = each_node(one, q, positions)
        return found

    def pages_of(self, layer: int, pages: Array, found: Array) -> Array:
        """Returns the tokens of some pages, `f[B, G, n P, d + e]`.

        Args:
            layer: number of the layer.
            pages: `i32[B, G, n]`, numbers of pages.
            found: `bool[B, G, n]`, pages that exist; the tokens of others are undefined.
        """
        P = self.kind.page_size
        slots = (pages[..., None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(*pages.shape[:2], -1)
        return jnp.take_along_axis(self.kv[layer], slots[..., None], 2)

    def latest(self, layer: int, first: Array, count: int) -> Array:
        """Returns `count` tokens from position `first` (`i32[B]`) on, `f[B, G, count, d + e]`; undefined where there is
        no token."""
        return jax.vmap(lambda kv, first: lax.dynamic_slice_in_dim(kv, first, count, 1))(self.kv[layer], first)

    def first_late_page(self, positions: Array) -> Array:
        """Returns the index of the first page that a query at each position (`i32[...]`) always attends to, since it
        has one of the latest tokens: `i32[...]`. Earlier pages have to be chosen."""
        return jnp.maximum(positions - self.kind.recent, 0) // self.kind.page_size

    def choose(self, layer: int, q: Array, positions: Array) -> tuple[Array, Array]:
        """Returns the pages with the highest scores for one query of each row, `i32[B, G, n]`, and a mask of those that
        exist, `bool[B, G, n]`.

        Args:
            layer: number of the layer.
            q: `f32[B, H, d]`, queries.
            positions: `i32[B]`, their positions.
        """
        digests, shape, score = self.digests[layer], self.shapes[layer], self.kind.score
        pages = min(self.kind.pages, digests.shape[2])

        def choose(q: Array, digests: Array, end: Array) -> tuple[Array, Array]:
            free = jnp.arange(digests.shape[1]) < end
            worth = jnp.where(free, score(q.reshape(shape.heads, -1, shape.width), digests).max(1), -jnp.inf)
            found, chosen = lax.top_k(worth, pages)                 # [G, pages]
            return chosen.astype(jnp.int32), found > -jnp.inf

        return jax.vmap(choose)(q, digests, self.first_late_page(positions))

    def always_read(self, layer: int, positions: Array, length: Array) -> tuple[Array, Array]:
        """Returns the tokens that one query of each row always attends to, `f[B, G, n, d + e]`, and a mask of those
        that exist, `bool[B, G, n]`.

        Args:
            layer: number of the layer.
            positions: `i32[B]`, positions of the queries.
            length: `i32[B]`, number of tokens of the text.
        """
        start, near = self.first_late_page(positions) * self.kind.page_size, min(
            self.kind.recent + self.kind.page_size, self.capacity)
        first = jnp.minimum(start, self.capacity - near)
        late = first[:, None] + jnp.arange(near, dtype=jnp.int32)
        late = (late >= start[:, None]) & (late < length[:, None])
        latest = self.latest(layer, first, near)
        return latest, jnp.broadcast_to(late[:, None], latest.shape[:3])

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        new, (_, pages), P, B = super().commit(entries, slots), self.filled(slots), self.kind.page_size, len(slots)
        at = (jnp.maximum(pages, 0)[:, :, None] * P + jnp.arange(P, dtype=jnp.int32)).reshape(B, 1, -1, 1)
        digests = []
        for layer, (kv, d) in enumerate(zip(new.kv, self.widths, strict=True)):
            keys = jnp.take_along_axis(kv, at, 2)[..., :d]
            digests.append(self.digested(layer, pages, keys.reshape(*keys.shape[:2], -1, P, d)))
        return new.replace(digests=tuple(digests))

    def filled(self, slots: Array) -> tuple[Array, Array]:
        """Returns the length of each row after a commit at positions `slots` (`i32[B, W]`; -1: dropped), `i32[B]`; and
        the indices of the full pages to which the commit wrote tokens, whose digests have to be computed, `i32[B, n]`,
        padded with -1."""
        P, W = self.kind.page_size, slots.shape[1]
        length = jnp.maximum(self.length, slots.max(1) + 1)
        first = jnp.where(slots >= 0, slots, self.capacity).min(1) // P
        pages = first[:, None] + jnp.arange(W // P + 2, dtype=jnp.int32)
        return length, jnp.where((pages + 1) * P <= length[:, None], pages, -1)

    def digested(self, layer: int, pages: Array, keys: Array) -> Array:
        """Returns the digests of a layer, `f[B, G, S / P, m]`, with those of some pages computed anew.

        Args:
            layer: number of the layer.
            pages: `i32[B, n]`, the pages; -1: none.
            keys: `f[B, G, n, P, d]`, their keys.
        """
        return write(self.digests[layer], self.kind.score.digest(keys).swapaxes(1, 2), pages)


@dataclasses.dataclass(frozen=True)
class PageConfig(SparseConfig):
    """Base of the configs of paged sparse caches. A derived class declares `name` and `score`.

    Attributes:
        budget: number of tokens of the pages that a query attends to; raised to three pages if it
            is less.
        page_size: number of tokens of a page.
        recent: number of latest tokens that are always attended to; no window may be wider.
        skip: numbers of layers that attend to all tokens.
        score: rule that computes digests and scores of pages.
    """

    budget: Count = 1024
    page_size: Count = 16
    recent: Count = 64
    skip: tuple[Whole, ...] = (0, 1)

    score: ClassVar[PageScore]

    @property
    def pages(self) -> int:
        """Number of pages that a query chooses beside those of the latest tokens: `budget` in pages, at least 3."""
        return max(3, self.budget // self.page_size)

    def is_sparse(self, capacity: int) -> bool:
        """Returns True if a text of `capacity` tokens is longer than what a query attends to."""
        return capacity > self.pages * self.page_size + self.recent

    def parts(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> dict[str, Any]:
        return super().parts(shapes, batch, self.rounded(size), dtype, inputs) | dict(
            digests=self.digests(shapes, batch, self.rounded(size), dtype))

    def rounded(self, size: int) -> int:
        """Returns a number of tokens rounded up to whole pages."""
        return -(-size // self.page_size) * self.page_size

    def digests(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any) -> tuple[Array, ...]:
        """Returns zeros for the digests (summaries, see `PageScore.digest`) of all pages: for each layer `f[B, G, size
        / page_size, m]`.

        Args:
            shapes: shape of each layer.
            batch: number of rows.
            size: maximum number of tokens of a text, a multiple of `page_size`.
            dtype: dtype of keys.
        """
        found = []
        for shape in shapes:
            one = jax.eval_shape(self.score.digest, jax.ShapeDtypeStruct((self.page_size, shape.width), dtype))
            found.append(jnp.zeros((batch, shape.heads, size // self.page_size, *one.shape), dtype))
        return tuple(found)
