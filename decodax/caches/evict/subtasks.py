"""Finished subtasks are dropped from the cache, and what stands behind them is computed anew (TIM and TIMRUN: "Beyond
Context Limits: Subconscious Threads for Long-Horizon Reasoning", Luo et al., 2025).

A text is a tree of tasks: what stands between an opening and its closing mark is a list of subtasks, which may have
such lists of their own. A list that is finished goes onto a stack; when there are more than `depth`, those that were
finished first are dropped, from behind their opening mark to before their closing one. What stands behind a hole closes
up to it: it is computed anew at the positions that were freed, by the model, from what is left. What is held is then
what the model would hold of the text without its holes, and the distances from a new token to it are those of that
text.

TIMRUN drops a list when it is finished. Here that happens when the prompt is in and each `every` tokens behind it, so
that what a text holds depends on its committed tokens alone, and drafts are cut there and nowhere else.
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
from decodax.caches.evict.marks import Marks, marked
from decodax.caches.evict.query_scores import moved, rope_of
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention

NESTED = 32
"""Lists of subtasks may stand in one another so deep; what is deeper stays."""

CHUNK = 64
"""Tokens that are computed anew at once."""


def finished(opens: Array, closes: Array) -> tuple[Array, Array]:
    """The lists that a text finishes.

    Args:
        opens: `bool[N]`, the last tokens of opening marks. closes: `i32[N]`, how many tokens a closing mark has, at its
            last one; else 0.

    Returns:
        For each token the first one of the list that it finishes, `i32[N]`, -1: none; and the one behind that list.
    """
    def read(stack: tuple[Array, Array], token: tuple[Array, ...]) -> tuple[Any, Array]:
        (begun, number), (at, opened, closed) = stack, token
        ends = (closed > 0) & (number > 0)
        begin = jnp.where(ends & (number <= NESTED), begun[jnp.clip(number - 1, 0, NESTED - 1)], -1)
        number = number - ends
        begun = begun.at[jnp.where(opened, number, NESTED)].set(at + 1, mode="drop")
        return (begun, number + opened), begin

    at = jnp.arange(len(opens), dtype=jnp.int32)
    _, begin = lax.scan(read, (jnp.zeros(NESTED, jnp.int32), jnp.int32(0)), (at, opens, closes))
    return begin, jnp.maximum(at + 1 - closes, begin)


def holes(tokens: Array, length: Array, opens: Marks, closes: Marks, depth: int) -> Array:
    """`bool[B, N]`: which of the first `length` (`i32[B]`) tokens of `tokens` (`i32[B, N]`) are in lists that are
    finished, but for the `depth` that were finished last."""
    N = tokens.shape[1]
    begin, end = jax.vmap(finished)(marked(tokens, opens) > 0, marked(tokens, closes))
    done = (begin >= 0) & (jnp.arange(N) < length[:, None])
    goes = done & (jnp.cumsum(done, 1) <= done.sum(1, keepdims=True) - depth)
    one = jax.vmap(lambda at, goes: jnp.zeros(N + 1, jnp.int32).at[jnp.where(goes, at, N)].add(1, mode="drop"))
    return (jnp.cumsum(one(begin, goes) - one(end, goes), 1) > 0)[:, :N]


@struct
class Subtasks(KeyValues):
    """The tokens that were not dropped, without gaps, keys at their places among them.

    Attributes:
        kv, given, widths: see `KeyValues`. dropped: `bool[B, S]`, by positions in the text.
        due: `i32[B]`, the length at which lists are dropped next. length: `i32[B]`, of the text. kind: static.
    """

    kv: tuple[Array, ...]
    dropped: Array
    due: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: SubtaskPruning = static()

    supports = frozenset({"trees"})

    @property
    def removed(self) -> Array:
        """`i32[B]`: how many tokens were dropped."""
        return self.dropped.sum(1, dtype=jnp.int32)

    def horizon(self) -> Array | None:
        return jnp.maximum(self.due - self.length, 1) if self.kv else None

    def stale(self) -> Array | None:
        return self.length >= self.due if self.kv else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if bias is not None:
            raise ValueError("cache: tim takes rotary positions, not a bias of the scores")
        own, back = k.shape[1] - q.shape[1], -self.removed[:, None]
        # queries and keys of a window go back together: only the distances to what is held change
        turn = lambda x: moved(self.shapes[layer], x, jnp.broadcast_to(back, x.shape[:2]))
        out = window_attention(turn(q), turn(k), v, window.visible(), window.positions + back, self.kv[layer],
                               self.length - self.removed, scale=scale, sliding=sliding, softcap=softcap,
                               key_positions=window.key_positions + back)
        return out, (k[:, own:], v[:, own:])

    def commit(self, entries: Entries, slots: Array) -> Subtasks:
        if not self.kv:
            return self
        back = self.removed[:, None]
        to = jnp.where(slots >= 0, slots - back, -1)
        turn = lambda shape, k: moved(shape, k, jnp.broadcast_to(-back, k.shape[:2]))
        kv = tuple(write(held, jnp.concatenate([turn(shape, entry[0]), entry[1]], -1), to)
                   for held, entry, shape in zip(self.kv, entries, self.shapes, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def settled(self, prompt: ReadPrompt) -> Subtasks:
        return self.replace(due=self.length + 0)        # `+ 0`: the state is donated, and no array may be in it twice

    def renewed(self, text: ReadPrompt, rows: Array) -> Subtasks:
        S, kind = self.capacity, self.kind
        tokens = jnp.pad(text.tokens, ((0, 0), (0, max(S - text.tokens.shape[1], 0))))[:, :S]
        gone = holes(tokens, self.length, kind.opens, kind.closes, kind.depth)
        gone = jnp.where(rows[:, None], gone | self.dropped, self.dropped)
        stays = ~gone & (jnp.arange(S) < self.length[:, None])
        number = stays.sum(1, dtype=jnp.int32)
        changed = gone & ~self.dropped
        # what stands before the first hole that is new lies where it lies
        before = stays & (jnp.cumsum(changed, 1) == 0)
        first = jnp.where(changed.any(1), before.sum(1, dtype=jnp.int32), number)
        order = jnp.argsort(~stays, 1, stable=True)

        def more(carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            start, kv = carry
            at = start[:, None] + jnp.arange(min(CHUNK, S), dtype=jnp.int32)
            live = at < number[:, None]
            some = jnp.take_along_axis(tokens, jnp.take_along_axis(order, jnp.minimum(at, S - 1), 1), 1)
            held = Dense(kv=kv, length=jnp.minimum(start, number), given=self.given, widths=self.widths)
            out = text.model.apply(text.params, causal(some, start, live), held)
            fine = live & jnp.isfinite(out.hidden).all(-1)
            return start + at.shape[1], held.commit(out.entries, jnp.where(fine, at, -1)).kv

        _, kv = lax.while_loop(lambda carry: (carry[0] < number).any(), more, (first, self.kv))
        return self.replace(kv=kv, dropped=gone, due=jnp.where(rows, self.length + kind.every, self.due))


@dataclasses.dataclass(frozen=True)
class SubtaskPruning(CacheConfig):
    """A `Subtasks` cache.

    Attributes:
        opens, closes: marks before and behind a list of subtasks.
        depth: how many finished lists stay. every: tokens from one time that lists are dropped to the next.
    """

    opens: Marks
    closes: Marks
    depth: int = 2
    every: int = 16

    def __post_init__(self) -> None:
        for name, least in (("depth", 0), ("every", 1)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise ValueError(f"{name}: got {value!r}, takes a number from {least}")
        for name in ("opens", "closes"):
            if not getattr(self, name):
                raise ValueError(f"{name[:-1]}: got (), takes the ids of a mark")

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        if shapes and all(rope_of(shape) is None for shape in shapes):
            raise ValueError("cache: tim moves tokens to other positions; takes a model with rotary positions")
        zeros = jnp.zeros(batch, jnp.int32)
        return Subtasks(kv=empty_kv(shapes, batch, capacity, dtype), dropped=jnp.zeros((batch, capacity), bool),
                        due=zeros + jnp.iinfo(jnp.int32).max, length=zeros + 0, given=inputs,
                        widths=key_widths(shapes), shapes=shapes, kind=self)
