"""Recycled Attention: periodically a token attends to all tokens, and the tokens after it attend only to those that got
the most of its attention ("Recycled Attention: Efficient inference for long-context language models", Xu et al., 2024).

Every `stride` tokens, a query attends to the whole cache, and each key head records the `budget` tokens that it attends
to most. Until the next time, queries attend to these and to the tokens since then. No token is ever evicted. The token
that attends to all tokens is verified in a round of its own, since the tokens after it need its choice. The heads of a
group are combined by the maximum of their weights, as in the authors' code. The stride is fixed here, and does not
depend on the similarity of queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.entry import AskedEntry
from decodax.cache.key_values import KVLayer
from decodax.caches.sparse.reading import SparseCache, SparseConfig, if_any
from decodax.common.options import Count, Range
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, Entries, PyTree


@struct
class RecycledAttentionCache(SparseCache):
    """All tokens, and the positions of the `K` tokens that got the most attention when a token last attended to all of
    them. Later tokens attend to these. An entry also holds the scaled query.

    Attributes:
        chosen: for each layer `i32[B, G, K]`, these positions; -1: none.
        since: `i32[B]`, position of the token whose attention chose them.
        due: `i32[B]`, length of the text at which the next token attends to all tokens and chooses.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    chosen: tuple[Array, ...]
    since: Array
    due: Array

    if TYPE_CHECKING:
        kind: RecycledAttentionConfig

    @property
    def now(self) -> Array:
        """`bool[B]`: True for rows whose next token attends to all tokens and chooses new positions."""
        return self.length >= self.due

    def max_commit(self) -> Array | None:
        return jnp.where(self.now, 1, self.due - self.length) if self.kv else None

    def full(self, window: Any) -> Array:
        return self.now[:, None]

    def always(self, layer: int) -> Array:
        chosen = self.chosen[layer]
        later = jnp.clip(self.since, 0)[:, None] + jnp.arange(min(self.kind.stride, self.capacity), dtype=jnp.int32)
        later = jnp.where(later < self.length[:, None], later, -1)
        return jnp.concatenate([chosen, jnp.broadcast_to(later[:, None], (*chosen.shape[:2], later.shape[1]))], -1)

    def read(self, layer: int, q: Array, positions: Array) -> None:
        return None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = super().attend(layer, q, k, v, window, **options)
        return out, entry if window.is_prefill else AskedEntry.of(entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> Self:
        new = super().commit(entries, slots)
        if not self.kv:
            return new
        if not isinstance(entries[0], AskedEntry):      # those of a prompt: the first token after it reads everything
            return new.replace(due=new.length)
        rows = self.now & (slots[:, 0] >= 0)
        return if_any(rows, lambda cache: cache._chosen([entry.queries[:, 0] for entry in entries], rows), new)

    def _chosen(self, queries: Sequence[Array], rows: Array) -> Self:
        """Returns the cache with the tokens that the newest tokens of `rows` (`bool[B]`) attend to most. `queries` are
        those of the newest tokens, `f[B, H, d]` for each layer."""
        made, newest = [], self.length - 1
        for kv, q, old, d in zip(self.kv, queries, self.chosen, self.widths, strict=True):
            B, G, S, _ = kv.shape
            scores = jnp.einsum("bgrd,bgsd->bgrs", q.reshape(B, G, -1, d).astype(jnp.float32),
                                kv[..., :d].astype(jnp.float32))
            seen = (jnp.arange(S) < newest[:, None])[:, None]       # its own token is among those that come since
            weights = jax.nn.softmax(scores, axis=-1, where=seen[:, :, None]).max(2)
            found, at = lax.top_k(jnp.where(seen, weights, -1), old.shape[2])
            made.append(jnp.where(rows[:, None, None], jnp.where(found >= 0, at.astype(jnp.int32), -1), old))
        return self.replace(chosen=tuple(made), since=jnp.where(rows, newest, self.since),
                            due=jnp.where(rows, newest + self.kind.stride, self.due))


@CACHES.register("recycled-attention", "Recycled Attention: Efficient inference for long-context language models",
                 "Xu et al. 2024", family="sparse")
@dataclasses.dataclass(frozen=True)
class RecycledAttentionConfig(SparseConfig):
    """Keeps all tokens; one query in `stride` attends to all of them, and the queries until the next such one to the
    tokens that got most of its attention, and to newer ones.

    It saves the time of attention to long texts, not memory. Example: `cache="recycled-attention:budget=1024"`.

    Attributes:
        budget: number of tokens that each key head records, newer ones not counted.
        stride: a query attends to all tokens every `stride` tokens.
    """

    budget: Count = 4096
    stride: Annotated[int, Range(2)] = 50

    name: ClassVar[str] = "recycled-attention"

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        chosen = tuple(jnp.full((batch, x.heads, min(self.budget, size)), -1, jnp.int32) for x in shapes)
        return RecycledAttentionCache(chosen=chosen, since=jnp.zeros(batch, jnp.int32), due=jnp.zeros(batch, jnp.int32),
                                      **self.parts(shapes, batch, size, dtype, inputs))
