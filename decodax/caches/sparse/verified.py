"""Verification against a part of the cache, and now and then against all of it ("SpecPV: Improving Self-Speculative
Decoding for Long-Context Generation via Partial Verification", Tan et al., 2025).

Tokens are answered from the first blocks of the text, some blocks that were chosen, the latest ones and what has come
since the choice. When `buffer` tokens have come so, their keys and values, which were computed from a part, are
computed anew from everything; the next token reads everything, and chooses blocks. No token is ever lost, and none is
taken back. Any draft goes with it: what is verified so is what plain decoding on this cache would give.

The authors' rounds that read everything also verify their drafts so, and drafts choose blocks with the newest token.
What a text holds would then depend on what was drafted; here it is the newest token alone that reads and chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.wrapper import Wrapper
from decodax.caches.prefill.shortened import Asking
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import causal, take
from decodax.pallas_kernels.window_attention import BLOCK, Bias, window_attention


def block_scores(q: Array, keys: Array) -> Array:
    """`f32[G, N]`: what queries `f[G, r, d]` may find in blocks of keys `f[G, N, P, d]`: the larger of their products
    with the largest and with the smallest value of each channel, on the average of a group's queries.

    Quest takes the larger product channel by channel, which bounds that of any key; this does not.
    """
    q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    high, low = (jnp.einsum("grd,gnd->grn", q, ends) for ends in (keys.max(2), keys.min(2)))
    return jnp.maximum(high, low).mean(1)


@struct
class PartlyRead(KeyValues):
    """Everything, in the order of positions, and which blocks of it are read.

    Attributes:
        kv, given, widths: see `KeyValues`. chosen: a tuple of one `i32[B, G, n]` a layer, blocks behind the first ones;
            -1: none.
        since: `i32[B]`, the position of the token that chose last; -1: none has, and everything is read. due: `i32[B]`,
            the length at which the next one does.
        length: `i32[B]`. kind: static.
    """

    kv: tuple[Array, ...]
    chosen: tuple[Array, ...]
    since: Array
    due: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    kind: PartialVerification = static()

    supports = frozenset({"trees"})

    def horizon(self) -> Array | None:
        # a token that chooses opens a round, before which the blocks are chosen
        return jnp.maximum(self.due - self.length, 1) if self.kind.parts(self.capacity) else None

    def stale(self) -> Array | None:
        return self.length >= self.due if self.kind.parts(self.capacity) else None

    def for_prompt(self) -> Cache:
        return PromptToVerify(base=self._dense(self.length), into=self.replace(kv=()))

    def _dense(self, length: Array) -> Dense:
        return Dense(kv=self.kv, length=length, given=self.given, widths=self.widths)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own = k.shape[1] - q.shape[1]
        entry = k[:, own:], v[:, own:]
        given = q, k, v, window.visible(), window.positions
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias,
                                       key_positions=window.key_positions)
        whole = lambda: window_attention(*given, self.kv[layer], self.length, **options)
        if window.certain or sliding is not None or not self.kind.parts(self.capacity):
            return whole(), entry
        if softcap is not None or bias is not None:
            raise ValueError("cache: specpv chooses blocks by queries and keys alone; takes a model without a soft cap "
                             "or a bias of its attention scores")
        some, at = self._read(layer)
        out = window_attention(*given, some, slot_positions=at, **options)
        full = (self.since[:, None] < 0) | (window.positions == self.since[:, None])
        everything = lax.cond(full.any(), whole, lambda: jnp.zeros_like(out))
        return jnp.where(full[:, :, None, None], everything, out), entry

    def _read(self, layer: int) -> tuple[Array, Array]:
        """The tokens that a row reads, `f[B, G, n, d + e]`, and their positions, `i32[B, G, n]`; -1: none."""
        kind, kv, blocks = self.kind, self.kv[layer], self.chosen[layer]
        P, (B, G, S, _) = kind.block, kv.shape
        inside = jnp.arange(P, dtype=jnp.int32)
        far = jnp.where(blocks[..., None] >= 0, kind.first + blocks[..., None] * P + inside, -1).reshape(B, G, -1)
        late = self._latest[:, None] + jnp.arange(min(kind.latest, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.broadcast_to(jnp.arange(kind.first, dtype=jnp.int32), (B, kind.first)), late], 1)
        always = jnp.where(always < self.length[:, None], always, -1)
        at = jnp.concatenate([jnp.broadcast_to(always[:, None], (B, G, always.shape[1])), far], 2)
        n = at.shape[2]
        at = jnp.pad(at, ((0, 0), (0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)
        return jnp.take_along_axis(kv, jnp.maximum(at, 0)[..., None], 2), at

    @property
    def _latest(self) -> Array:
        """`i32[B]`: where what is read of the latest tokens begins, behind whole blocks."""
        return self.kind.first + self.kind.blocks_before(self.since) * self.kind.block

    def commit(self, entries: Entries, slots: Array) -> PartlyRead:
        if not self.kv:
            return self
        kv = tuple(write(held, jnp.concatenate(entry, -1), slots)
                   for held, entry in zip(self.kv, entries, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def renewed(self, text: ReadPrompt, rows: Array) -> PartlyRead:
        n, newest = min(self.kind.buffer + 1, text.tokens.shape[1]), self.length
        exact = jnp.where(self.since < 0, newest, self.since + 1)      # entries that everything was read for
        start = jnp.maximum(newest + 1 - n, 0)
        at = start[:, None] + jnp.arange(n, dtype=jnp.int32)
        live = rows[:, None] & (at >= exact[:, None]) & (at <= newest[:, None])
        window = causal(jnp.take_along_axis(text.tokens, jnp.minimum(at, text.tokens.shape[1] - 1), 1), start, live)
        out = text.model.apply(text.params, window, Asking(base=self._dense(jnp.where(rows, exact, 0))))
        fine = jnp.isfinite(out.hidden).all(-1)
        # the newest token's own entry comes of the round that it opens
        slots = jnp.where(live & fine & (at < newest[:, None]), at, -1)
        new = self.commit([entry[:2] for entry in out.entries], slots)
        last = newest - start
        queries = [take(entry[2], last[:, None])[:, 0] for entry in out.entries]
        return new._chosen(queries, rows)

    def _chosen(self, queries: Sequence[Array], rows: Array) -> PartlyRead:
        """Where the newest tokens of `rows` (`bool[B]`) choose by their queries, `f[B, H, d]` of each layer."""
        P, first, made = self.kind.block, self.kind.first, []
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


@struct
class PromptToVerify(Wrapper):
    """A prompt, all of which is read, and what holds it then, without its keys and values."""

    base: Dense
    into: PartlyRead

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        # `+ 0`: the state is donated, and no array may stand in it twice
        return self.into.replace(kv=self.base.kv, length=self.base.length, due=self.base.length + 0)


@dataclasses.dataclass(frozen=True)
class PartialVerification(CacheConfig):
    """A `PartlyRead` cache.

    Attributes:
        budget: tokens of the blocks that are chosen; of one block at least.
        sinks, window: how many blocks are always read at the beginning of a text and at its end; the second 1 at least.
        block: tokens of a block. buffer: tokens that are answered from a part before one reads everything.
    """

    budget: int = 4096
    sinks: int = 2
    window: int = 8
    block: int = 16
    buffer: int = 20

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("budget", self.block), ("sinks", 0), ("window", 1), ("buffer", 1)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise ValueError(f"{name}: got {value!r}, takes a number from {least}")

    @property
    def blocks(self) -> int:
        """How many blocks are chosen."""
        return self.budget // self.block

    @property
    def first(self) -> int:
        """Tokens at the beginning of a text that are always read."""
        return self.sinks * self.block

    @property
    def latest(self) -> int:
        """The most tokens that are read at the end of a text: the window, up to a block that is not whole before it,
        and those since the choice."""
        return self.window * self.block + self.block + self.buffer

    def blocks_before(self, length: Any) -> Any:
        """How many whole blocks lie between the first ones and the window of a text of so many tokens."""
        return jnp.maximum(length - self.first - self.window * self.block, 0) // self.block

    def parts(self, capacity: int) -> bool:
        """Whether texts of so many tokens have blocks that are not read."""
        return (capacity - self.first) // self.block - self.window > self.blocks

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        size = -(-capacity // self.block) * self.block
        number = self.blocks if self.parts(size) else 0
        zeros = jnp.zeros(batch, jnp.int32)
        return PartlyRead(kv=empty_kv(shapes, batch, size, dtype), widths=key_widths(shapes), given=inputs,
                          chosen=tuple(jnp.full((batch, shape.heads, number), -1, jnp.int32) for shape in shapes),
                          since=zeros - 1, due=zeros + jnp.iinfo(jnp.int32).max, length=zeros + 0, kind=self)
