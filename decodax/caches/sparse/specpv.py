"""SpecPV: tokens are verified with a part of the cache, and periodically with all of it ("SpecPV: Improving
Self-Speculative Decoding for Long-Context Generation via Partial Verification", Tan et al., 2025).

Tokens attend to the first blocks of the text, to chosen blocks, to the latest blocks, and to the tokens since the
choice. After `buffer` such tokens, their keys and values, which were computed from a part of the cache, are recomputed
from all of it; the next token attends to all tokens, and chooses blocks. No token is evicted or taken back. Any draft
can be combined with it: the output is that of plain decoding with this cache.

In the authors' code, rounds that attend to all tokens verify their drafts in that way, too, and drafts choose blocks
together with the newest token. The output would then depend on the drafts. Here only the newest token attends to all
tokens and chooses.

Without drafts, blocks and tokens are those of the authors' code (cb9a677), except that up to 15 tokens between the
last whole block and the window are attended to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.cache.key_values import KVLayer
from decodax.caches.asking import AskingDense
from decodax.caches.sparse.reading import IndexedCache, SparseConfig
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.cache import Cache, PyTree
from decodax.core.capabilities import ReadPrompt, Refreshes
from decodax.core.window import causal, take


def block_scores(q: Array, keys: Array) -> Array:
    """Returns the scores of blocks, `f32[G, N]`: the larger of the query's products with the channelwise maximum and
    minimum of the keys, averaged over the queries of a group.

    Quest takes the larger product channel by channel, which bounds the product with any key. This score is no such
    bound.

    Args:
        q: `f[G, r, d]`, queries.
        keys: `f[G, N, P, d]`, keys of the blocks.
    """
    q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    high, low = (jnp.einsum("grd,gnd->grn", q, ends) for ends in (keys.max(2), keys.min(2)))
    return jnp.maximum(high, low).mean(1)


@struct
class SpecPVCache(IndexedCache, Refreshes):
    """All tokens, and the chosen blocks.

    Attributes:
        chosen: for each layer `i32[B, G, n]`, the chosen blocks, counted after the first ones; -1: none.
        since: `i32[B]`, position of the token that chose last; -1: none has, and tokens attend to all tokens.
        due: `i32[B]`, length of the text at which the next token chooses.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    chosen: tuple[Array, ...]
    since: Array
    due: Array

    if TYPE_CHECKING:
        kind: SpecPVConfig

    def max_commit(self) -> Array | None:
        # a token that chooses begins a round, before which the blocks are chosen
        return jnp.maximum(self.due - self.length, 1) if self.kind.parts_of(self.capacity) else None

    def needs_refresh(self) -> Array | None:
        return self.length >= self.due if self.kind.parts_of(self.capacity) else None

    def is_dense(self, layer: int, is_prefill: bool) -> bool:
        return is_prefill or self.kind.keeps_dense(layer, self.shapes[layer]) or not self.kind.parts_of(self.capacity)

    def index(self, prompt: Dense) -> Self:
        # `+ 0`: the state is donated, and no array may be in it twice
        return self.replace(kv=prompt.kv, length=prompt.length, due=prompt.length + 0)

    def _dense(self, length: Array) -> Dense:
        return Dense(kv=self.kv, length=length, given=self.given, widths=self.widths)

    def full(self, window: Any) -> Array:
        return (self.since[:, None] < 0) | (window.positions == self.since[:, None])

    def always(self, layer: int) -> Array:
        kind, kv, blocks = self.kind, self.kv[layer], self.chosen[layer]
        P, (B, G, S, _) = kind.block_size, kv.shape
        inside = jnp.arange(P, dtype=jnp.int32)
        far = jnp.where(blocks[..., None] >= 0, kind.first + blocks[..., None] * P + inside, -1).reshape(B, G, -1)
        begin = kind.first + kind.blocks_before(self.since) * P
        late = begin[:, None] + jnp.arange(min(kind.latest, S), dtype=jnp.int32)
        first = jnp.broadcast_to(jnp.arange(kind.first, dtype=jnp.int32), (B, kind.first))
        near = jnp.concatenate([first, late], 1)
        near = jnp.where(near < self.length[:, None], near, -1)
        return jnp.concatenate([jnp.broadcast_to(near[:, None], (B, G, near.shape[1])), far], 2)

    def read(self, layer: int, q: Array, positions: Array) -> None:
        return None

    def refresh(self, text: ReadPrompt, rows: Array) -> Self:
        n, newest = min(self.kind.buffer + 1, text.tokens.shape[1]), self.length
        exact = jnp.where(self.since < 0, newest, self.since + 1)      # entries from here on are computed anew
        start = jnp.maximum(newest + 1 - n, 0)
        at = start[:, None] + jnp.arange(n, dtype=jnp.int32)
        live = rows[:, None] & (at >= exact[:, None]) & (at <= newest[:, None])
        window = causal(jnp.take_along_axis(text.tokens, jnp.minimum(at, text.tokens.shape[1] - 1), 1), start, live)
        out = text.model.apply(text.params, window, AskingDense(base=self._dense(jnp.where(rows, exact, 0))))
        fine = jnp.isfinite(out.hidden).all(-1)
        # the newest token's own entry comes of the round that begins with it
        slots = jnp.where(live & fine & (at < newest[:, None]), at, -1)
        new = self.commit([entry.pair for entry in out.entries], slots)
        last = newest - start
        queries = [take(entry.queries, last[:, None])[:, 0] for entry in out.entries]
        return new.choose_blocks(queries, rows)

    def choose_blocks(self, queries: Sequence[Array], rows: Array) -> Self:
        """Returns the cache with the blocks that the newest tokens of `rows` (`bool[B]`) choose. `queries` are those of
        these tokens, `f[B, H, d]` for each layer."""
        P, first, made = self.kind.block_size, self.kind.first, []
        free = self.kind.blocks_before(self.length)
        for kv, q, old, d in zip(self.kv, queries, self.chosen, self.widths, strict=True):
            B, G, S, _ = kv.shape
            blocks = kv[:, :, first:, :d].reshape(B, G, (S - first) // P, P, d)
            scores = jax.vmap(block_scores)(q.reshape(B, G, -1, d), blocks)
            scores = jnp.where(jnp.arange(scores.shape[2]) < free[:, None, None], scores, -jnp.inf)
            found, at = lax.top_k(scores, old.shape[2])
            at = jnp.where(found > -jnp.inf, at.astype(jnp.int32), -1)
            made.append(jnp.where(rows[:, None, None], at, old))
        return self.replace(chosen=tuple(made), since=jnp.where(rows, self.length, self.since),
                            due=jnp.where(rows, self.length + self.kind.buffer + 1, self.due))


@CACHES.register("specpv",
                 "SpecPV: Improving Self-Speculative Decoding for Long-Context Generation via Partial Verification",
                 "Tan et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True)
class SpecPVConfig(SparseConfig):
    """Keeps all tokens; tokens attend to chosen blocks, to the first and the latest ones. Every `buffer` tokens, keys
    and values are recomputed with attention to all tokens.

    It is made for long texts with drafts, such as `algorithm="prompt-lookup"`, which are then verified with a part of
    the cache. Example: `cache="specpv:budget=1024"`.

    Attributes:
        budget: number of tokens of the chosen blocks; at least one block.
        sinks: number of blocks at the beginning of a text that are always attended to.
        window: number of blocks at the end of a text that are always attended to.
        block_size: number of tokens of a block.
        buffer: number of tokens that attend to a part, before one attends to all tokens.
    """

    budget: Count = 4096
    sinks: Whole = 2
    window: Count = 8
    block_size: Count = 16
    buffer: Count = 20

    name: ClassVar[str] = "specpv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.block_size:
            raise ValueError(f"budget: got {self.budget}, takes the {self.block_size} tokens of a block or more")

    @property
    def blocks(self) -> int:
        """Number of blocks that are chosen in each head, `budget // block_size`."""
        return self.budget // self.block_size

    @property
    def first(self) -> int:
        """Number of tokens at the beginning of a text that are always attended to."""
        return self.sinks * self.block_size

    @property
    def latest(self) -> int:
        """Maximum number of tokens attended to at the end of a text: those of the window, of an incomplete block before
        it, and those since the choice."""
        return self.window * self.block_size + self.block_size + self.buffer

    def blocks_before(self, length: Any) -> Any:
        """Returns the number of complete blocks between the first blocks and the window, for a text of `length`
        tokens."""
        return jnp.maximum(length - self.first - self.window * self.block_size, 0) // self.block_size

    def parts_of(self, capacity: int) -> bool:
        """Returns True if the cache for texts of `capacity` tokens has more blocks than a token attends to, so that
        blocks have to be chosen."""
        return (capacity - self.first) // self.block_size - self.window > self.blocks

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        size = -(-size // self.block_size) * self.block_size
        number = self.blocks if self.parts_of(size) else 0
        zeros = jnp.zeros(batch, jnp.int32)
        return SpecPVCache(chosen=tuple(jnp.full((batch, x.heads, number), -1, jnp.int32) for x in shapes),
                           since=zeros - 1, due=zeros + jnp.iinfo(jnp.int32).max,
                           **self.parts(shapes, batch, size, dtype, inputs))
