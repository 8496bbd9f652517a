"""Attention to all tokens now and then, and in between to those that it went to then ("Recycled Attention: Efficient
inference for long-context language models", Xu et al., 2024).

Each `stride` tokens a query reads the whole cache, and the `budget` tokens that it attends to most, of each head of
keys, are noted; until the next time, queries read those and what has come since. No token is ever lost. The token that
reads everything is verified in a round of its own, since those behind it read what it noted. Heads of a group are taken
together by the largest of their weights, as in the authors' code; their stride is fixed here, not led by similarity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree
from decodax.pallas_kernels.window_attention import BLOCK, Bias, window_attention


@struct
class Recycling(KeyValues):
    """Everything, in the order of positions, and which tokens are read.

    Attributes:
        kv, given, widths: see `KeyValues`. chosen: a tuple of one `i32[B, G, K]` a layer, positions; -1: none.
        since: `i32[B]`, the position of the token that chose last. due: `i32[B]`, the length at which the next one
            comes.
        length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    chosen: tuple[Array, ...]
    since: Array
    due: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    kind: Recycled = static()

    supports = frozenset({"trees"})

    @property
    def now(self) -> Array:
        """`bool[B]`: rows whose newest token reads everything."""
        return self.length >= self.due

    def horizon(self) -> Array | None:
        return jnp.where(self.now, 1, self.due - self.length) if self.kv else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own = k.shape[1] - q.shape[1]
        given = q, k, v, window.visible(), window.positions
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias,
                                       key_positions=window.key_positions)
        whole = lambda: window_attention(*given, self.kv[layer], self.length, **options)
        entry = (k[:, own:], v[:, own:], *([] if window.certain else [q * scale]))
        if window.certain or sliding is not None:
            return whole(), entry
        if softcap is not None or bias is not None:
            raise ValueError("cache: recycled-attention chooses tokens by queries and keys alone; takes a model "
                             "without a soft cap or a bias of its attention scores")
        some, at = self._read(layer)
        out = window_attention(*given, some, slot_positions=at, **options)
        everything = lax.cond(self.now.any(), whole, lambda: jnp.zeros_like(out))
        return jnp.where(self.now[:, None, None, None], everything, out), entry

    def _read(self, layer: int) -> tuple[Array, Array]:
        """The tokens that a row reads, `f[B, G, n, d + e]`, and their positions, `i32[B, G, n]`."""
        kv, chosen = self.kv[layer], self.chosen[layer]
        later = jnp.clip(self.since, 0)[:, None] + jnp.arange(min(self.kind.stride, self.capacity), dtype=jnp.int32)
        later = jnp.where(later < self.length[:, None], later, -1)
        at = jnp.concatenate([chosen, jnp.broadcast_to(later[:, None], (*chosen.shape[:2], later.shape[1]))], -1)
        n = at.shape[2]
        at = jnp.pad(at, ((0, 0), (0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)
        return jnp.take_along_axis(kv, jnp.maximum(at, 0)[..., None], 2), at

    def commit(self, entries: Entries, slots: Array) -> Recycling:
        if not self.kv:
            return self
        kv = tuple(write(held, jnp.concatenate(entry[:2], -1), slots)
                   for held, entry in zip(self.kv, entries, strict=True))
        new = self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))
        if len(entries[0]) == 2:        # a prompt's: the first token behind it reads everything
            return new.replace(due=new.length)
        rows = self.now & (slots[:, 0] >= 0)
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._chosen([entry[2][:, 0] for entry in entries], rows))
        return lax.while_loop(lambda c: c[0], once, (rows.any(), new))[1]

    def _chosen(self, queries: Sequence[Array], rows: Array) -> Recycling:
        """With what the newest tokens of those rows attend to, whose queries are `f[B, H, d]` of each layer."""
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


@dataclasses.dataclass(frozen=True)
class Recycled(CacheConfig):
    """A `Recycling` cache.

    Attributes:
        budget: tokens that are noted. stride: tokens from one that reads everything to the next; 2 at least.
    """

    budget: int = 4096
    stride: int = 50

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or self.budget < 1 or self.stride < 2:
            raise ValueError(f"budget, stride: got {self.budget} and {self.stride}, takes 1 and 2 or more")

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        zeros = jnp.zeros(batch, jnp.int32)
        return Recycling(kv=empty_kv(shapes, batch, capacity, dtype), widths=key_widths(shapes), given=inputs,
                         chosen=tuple(jnp.full((batch, shape.heads, min(self.budget, capacity)), -1, jnp.int32)
                                      for shape in shapes), since=zeros, due=zeros + 0, length=zeros + 0, kind=self)
