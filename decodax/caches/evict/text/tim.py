"""TIM and TIMRUN: evicts finished subtasks, and recomputes the tokens after them ("Beyond Context Limits: Subconscious
Threads for Long-Horizon Reasoning", Luo et al., 2025).

A text is a tree of tasks: the tokens between an opening and its closing mark are a list of subtasks, which may contain
such lists. Finished lists are put onto a stack. When there are more than `depth`, the oldest ones are evicted; their
opening and closing marks are kept. The later tokens move up into the gap: the model recomputes them at the freed
positions, from the tokens that are left. The cache then equals that of the text without the evicted lists, and so do
the distances from a new token.

TIMRUN evicts a list when it is finished. Here this happens after the prompt and then every `every` tokens. So the cache
depends on the committed tokens alone, and rounds are only cut at these points.

No code is public. Marks are token ids; the JSON of the authors' model is not parsed. The arrays have the length of
the whole text: the cache saves time and positions, not memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, write
from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, Score, empty_kv, key_widths
from decodax.caches.evict.text.marks import Marks, marked, read_marks
from decodax.caches.rotation import moved, rope_of
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import PromptPhase, ReadPrompt, Refreshes
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention

NESTED = 32
"""Maximum depth of nested lists of subtasks; deeper lists are never evicted."""

CHUNK = 64
"""Number of tokens that are recomputed at a time."""


def finished(opens: Array, closes: Array) -> tuple[Array, Array]:
    """Finds the finished lists of a text: parts between an opening and a closing mark, which may be nested.

    Args:
        opens: `bool[N]`, True at the last token of an opening mark.
        closes: `i32[N]`, at the last token of a closing mark the number of tokens of the mark; 0 elsewhere.

    Returns:
        For each token that completes a closing mark the index of the first token inside its list, `i32[N]`, -1 for
        other tokens; and the index of the first token of the closing mark, `i32[N]`.
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
    """Returns a mask of the tokens to evict, `bool[B, N]`: those between the marks of finished lists, except the
    `depth` lists that were finished last.

    Args:
        tokens: `i32[B, N]`, the text.
        length: `i32[B]`, number of its tokens.
        opens, closes: marks before and after a list.
        depth: number of finished lists to keep.
    """
    N = tokens.shape[1]
    begin, end = jax.vmap(finished)(marked(tokens, opens) > 0, marked(tokens, closes))
    done = (begin >= 0) & (jnp.arange(N) < length[:, None])
    goes = done & (jnp.cumsum(done, 1) <= done.sum(1, keepdims=True) - depth)
    one = jax.vmap(lambda at, goes: jnp.zeros(N + 1, jnp.int32).at[jnp.where(goes, at, N)].add(1, mode="drop"))
    return (jnp.cumsum(one(begin, goes) - one(end, goes), 1) > 0)[:, :N]


@struct
class TIMCache(KeyValues, PromptPhase, Refreshes):
    """The tokens that were not evicted, without gaps. Their positions are counted without the evicted ones.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`.
        dropped: `bool[B, S]`, the evicted tokens, by their position in the text.
        due: `i32[B]`, length of the text at which lists are evicted next.
        length: `i32[B]`, number of tokens of the text, the evicted ones included.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    kv: tuple[Array, ...]
    dropped: Array
    due: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: TIMConfig = static()

    supports = frozenset({"trees"})

    @property
    def removed(self) -> Array:
        """Number of tokens of each row that were evicted so far, `i32[B]`."""
        return self.dropped.sum(1, dtype=jnp.int32)

    def max_commit(self) -> Array | None:
        return jnp.maximum(self.due - self.length, 1) if self.kv else None

    def needs_refresh(self) -> Array | None:
        return self.length >= self.due if self.kv else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        back = -self.removed[:, None]
        # queries and keys of a window move together: only the distances to the cached tokens change
        turn = lambda x: moved(self.shapes[layer], x, jnp.broadcast_to(back, x.shape[:2]))
        out = window_attention(turn(q), turn(k), v, window.visible(), window.positions + back, self.kv[layer],
                               self.length - self.removed, scale=scale, sliding=sliding, softcap=softcap,
                               key_positions=window.key_positions + back, sinks=sinks)
        return out, own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> TIMCache:
        if not self.kv:
            return self
        back = self.removed[:, None]
        to = jnp.where(slots >= 0, slots - back, -1)
        turn = lambda shape, k: moved(shape, k, jnp.broadcast_to(-back, k.shape[:2]))
        kv = tuple(write(held, jnp.concatenate([turn(shape, entry.keys), entry.values], -1), to)
                   for held, entry, shape in zip(self.kv, entries, self.shapes, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def finish_prefill(self, prompt: ReadPrompt) -> TIMCache:
        return self.replace(due=self.length + 0)        # `+ 0`: the state is donated, and no array may be in it twice

    def refresh(self, text: ReadPrompt, rows: Array) -> TIMCache:
        S, kind = self.capacity, self.kind
        tokens = jnp.pad(text.tokens, ((0, 0), (0, max(S - text.tokens.shape[1], 0))))[:, :S]
        gone = holes(tokens, self.length, kind.opens, kind.closes, kind.depth)
        gone = jnp.where(rows[:, None], gone | self.dropped, self.dropped)
        stays = ~gone & (jnp.arange(S) < self.length[:, None])
        number = stays.sum(1, dtype=jnp.int32)
        changed = gone & ~self.dropped
        # the tokens before the first new hole do not move
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
class TIMConfig(KVConfig):
    """Configuration of a `TIMCache`.

    Attributes:
        opens, closes: marks before and after a list of subtasks.
        depth: number of finished lists to keep.
        every: number of tokens between two evictions.
    """

    opens: Marks
    closes: Marks
    depth: Whole = 2
    every: Count = 16

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if shapes and all(rope_of(shape) is None for shape in shapes):
            raise ValueError("cache: tim moves tokens to other positions; takes a model with rotary positions")
        zeros = jnp.zeros(batch, jnp.int32)
        return TIMCache(kv=empty_kv(shapes, batch, size, dtype), dropped=jnp.zeros((batch, size), bool),
                        due=zeros + jnp.iinfo(jnp.int32).max, length=zeros + 0, given=inputs,
                        widths=key_widths(shapes), shapes=shapes, kind=self)


@CACHES.register("tim", "Beyond Context Limits: Subconscious Threads for Long-Horizon Reasoning", "Luo et al. 2025",
                 family="evict")
def tim(open: Any = (), close: Any = (), depth: Whole = 2, every: Count = 16) -> TIMConfig:
    """Evicts finished lists of subtasks, and recomputes the tokens after them.

    For models that write their subtasks between marks. It saves positions and time, not memory.

    Args:
        open: token id of the mark before a list, or a tuple of ids and of tuples of ids (sequences). Required.
        close: the mark after a list, in the same form. Required.
        depth: number of finished lists to keep, the latest ones.
        every: number of tokens between two evictions.
    """
    marks = {name: read_marks(given, name) for name, given in (("open", open), ("close", close))}
    for name, found in marks.items():
        if not found:
            raise ValueError(f"{name}: got (), takes the ids of a mark")
    return TIMConfig(marks["open"], marks["close"], depth, every)
