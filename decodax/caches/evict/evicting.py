"""A cache that evicts tokens, with an eviction rule from a paper.

All tokens of a prompt are prefilled first. Then the rule chooses the tokens to keep, and decoding continues with arrays
of that size and slots for later tokens. These are all kept (most papers), or the rule runs again every `every` tokens.

The cache's content depends on the committed tokens alone: a round commits no token beyond the next eviction
(`Cache.max_commit`), and statistics are gathered from committed tokens. So drafts, trees and chunks of a prompt do not
change the result.
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
from decodax.cache.entry import AskedEntry, KVEntry, MeasuredEntry, own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, Score, key_widths, refuse_prefill
from decodax.cache.packed_heads import SEGMENT, segment_attention, segments_of, slots_of, unpack
from decodax.cache.tree_buffer import TreeBuffer
from decodax.caches.evict.compaction import compacted, held_of
from decodax.caches.evict.scores import Gathered, Taken, TokenScore
from decodax.caches.evict.selection import Budget, Selection, Top, tables
from decodax.common.sizes import in_bytes
from decodax.common.struct import static, struct
from decodax.core.cache import Entries, PyTree
from decodax.core.capabilities import Draftable, ReadPrompt, WholePrompt
from decodax.core.types import outputs
from decodax.pallas_kernels.window_attention import (
    Bias,
    merge,
    whole_blocks,
    window_attention,
    window_attention_lse,
)

TAKES = "a number of tokens from 1, a share of the text between 0 and 1, or bytes as '64MB'; or one of the first two " \
    "for each layer"
"""Text for errors about budgets."""


@struct
class Evicting(KeyValues, WholePrompt):
    """Keys and values of the tokens that are kept. The slots of each head are in the order of positions, without gaps.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`; layers may have different numbers of slots `S`. If the heads of a layer
            keep different numbers of tokens, it is `f[B, N, SEGMENT, d + e]` (`decodax.cache.packed_heads`).
        positions: for each layer the position of the token in each slot, `i32[B, G, S]` or `i32[B, N, SEGMENT]`; -1:
            empty.
        starts: for each layer the first segment of each head, `i32[B, G]`; None if heads are not packed.
        count: for each layer the number of filled slots, `i32[B, G]`.
        queries: for each layer the latest `w` queries, `f[B, H, w, d]`; that of position `p` is at `p % w`.
        gathered: for each layer the statistics of the score.
        length: `i32[B]`, number of tokens of the verified text.
        prompt_length: `i32[B]`, length of the text after prefill.
        due: `i32[B]`, length of the text at which the rule evicts next.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        size: static; maximum number of tokens of a text.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
        whole: static; True during prefill, when nothing is evicted.
    """

    kv: tuple[Array, ...]
    positions: tuple[Array, ...]
    starts: tuple[Array | None, ...]
    count: tuple[Array, ...]
    queries: tuple[Array, ...]
    gathered: tuple[Gathered, ...]
    length: Array
    prompt_length: Array
    due: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: Eviction = static()
    whole: bool = static(default=False)

    supports = frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    def max_commit(self) -> Array | None:
        return None if self.whole else self.due - self.length

    def room(self, running: Array) -> Array | None:
        if self.whole or self.kind.every is not None or not self.kv:
            return None
        free = [self._free(layer) for layer in range(len(self.kv))]
        return functools.reduce(jnp.minimum, free)

    def _free(self, layer: int) -> Array:
        """Returns the number of free slots of the fullest head of a layer, `i32[B]`."""
        kv, count, starts = self.kv[layer], self.count[layer], self.starts[layer]
        if starts is None:
            return kv.shape[2] - count.max(1)
        ends = jnp.concatenate([starts[:, 1:], jnp.full((len(starts), 1), kv.shape[1], jnp.int32)], 1)
        return ((ends - starts) * SEGMENT - count).min(1)

    def heads(self, layer: int) -> tuple[Array, Array]:
        """Returns a layer's keys and values, `f[B, G, S, d + e]`, and positions, `i32[B, G, S]`, unpacked: the tokens
        of each head first, then empty slots with position -1."""
        kv, positions, starts = self.kv[layer], self.positions[layer], self.starts[layer]
        if starts is None:
            return kv, positions
        slots = min(self.size, positions[0].size)
        row = lambda kv, positions, starts, count: (unpack(kv, starts, count, slots),
                                                    unpack(positions, starts, count, slots, -1))
        return jax.vmap(row)(kv, positions, starts, self.count[layer])

    def check_windows(self) -> None:
        if not self.whole:
            refuse_prefill(self.kind.name)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        score = self.kind.selection.score
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias,
                                       key_positions=window.key_positions)
        given: tuple[Any, ...] = (q, k, v, window.visible(), window.positions)
        packed = self.starts[layer]
        if packed is not None and sliding is None and bias is None:
            near = window_attention_lse(*given, sinks=sinks, **options)
            far = segment_attention(q, self.kv[layer], self.positions[layer] >= 0, packed, scale=scale, softcap=softcap)
            return merge(near, far)[0], self._entry(q, k, v, scale)
        kv, positions = self.heads(layer)
        given, options["sinks"] = (*given, kv), sinks
        if self.kind.selection.uniform and sliding is None and bias is None:
            options["length"] = self.count[layer][:, 0]
        else:
            options["slot_positions"] = positions
        if self.whole and score.reads == "attention":
            out, sums = window_attention_lse(*given, **options)
            own = own_entry(q, k, v)
            return out, MeasuredEntry(own.keys, own.values, q * scale, sums)
        return window_attention(*given, **options), self._entry(q, k, v, scale)

    def _entry(self, q: Array, k: Array, v: Array, scale: float) -> KVEntry:
        score = self.kind.selection.score
        asks = self._chooses and (score.latest or score.reads == "queries")
        own = own_entry(q, k, v)
        return AskedEntry.of(own, q * scale) if asks else own

    @property
    def _chooses(self) -> bool:
        """True if the rule will run again."""
        return self.whole or self.kind.every is not None

    def commit(self, entries: Entries, slots: Array) -> Evicting:
        if not self.kv:
            return self
        taken = [self._take(layer, entry, slots) for layer, entry in enumerate(entries)]
        kv, positions, count, queries, gathered = zip(*taken, strict=True)
        new = self.replace(kv=kv, positions=positions, count=count, queries=queries, gathered=gathered,
                           length=jnp.maximum(self.length, slots.max(1) + 1))
        if self.whole or self.kind.every is None:
            return new
        # a loop of one trip or none, since XLA copies what a conditional writes to
        over = lambda c: c[0]
        once = lambda c: (jnp.zeros((), bool), c[1]._chosen(c[1].length >= c[1].due))
        return lax.while_loop(over, once, ((new.length >= new.due).any(), new))[1]

    def _take(self, layer: int, entry: PyTree, slots: Array) -> tuple[Any, ...]:
        held, count, score = self.positions[layer], self.count[layer], self.kind.selection.score
        starts, (B, G), S = self.starts[layer], count.shape, held.shape[2]
        wanted = slots >= 0
        put = jax.vmap(jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop")))
        rank = jnp.cumsum(wanted, 1, dtype=jnp.int32) - 1
        number = wanted.sum(1, dtype=jnp.int32)
        both = entry.both
        if starts is not None:
            to = jnp.where(wanted[:, None], jax.vmap(slots_of)(starts, count[:, :, None] + rank[:, None]), held[0].size)
            flat = lambda x: x.reshape(B, -1, *x.shape[3:])
            one = jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop"))
            kv = one(flat(self.kv[layer]), both.swapaxes(1, 2), to).reshape(self.kv[layer].shape)
            held = one(flat(held), jnp.broadcast_to(slots[:, None], to.shape), to).reshape(held.shape)
        elif self.kind.selection.uniform:
            to = jnp.where(wanted, count[:, :1] + rank, -1)
            kv = write(self.kv[layer], both, to)
            to = jnp.broadcast_to(jnp.where(to < 0, S, to)[:, None], (B, G, to.shape[1]))
        else:
            to = jnp.where(wanted[:, None], count[:, :, None] + rank[:, None], S)
            kv = put(self.kv[layer], both.swapaxes(1, 2), to)
        if starts is None:
            held = put(held, jnp.broadcast_to(slots[:, None], to.shape), to)
        queries, gathered = self.queries[layer], self.gathered[layer]
        if (w := queries.shape[2]):
            newest = jnp.maximum(slots.max(1), self.length - 1)[:, None]
            at = jnp.where(wanted & (slots > newest - w), slots % w, w)
            queries = jax.vmap(lambda ring, new, at: ring.at[:, at].set(new.astype(ring.dtype), mode="drop"))(
                queries, entry.queries.swapaxes(1, 2), at)
        if (self.whole and score.reads == "attention") or (self._chooses and score.reads == "queries"):
            seen = (kv, held) if starts is None else self.replace(
                kv=(kv,), positions=(held,), starts=(starts,), count=(count + number[:, None],)).heads(0)
            sums = entry.sums if score.reads == "attention" else jnp.zeros(entry.queries.shape[:3], jnp.float32)
            gathered = score.gather(self.shapes[layer], gathered, Taken(
                queries=entry.queries, sums=sums, positions=slots, kv=seen[0], held=seen[1]))
        return kv, held, count + number[:, None], queries, gathered

    def _chosen(self, rows: Array) -> Evicting:
        """Returns the cache after an eviction in `rows` (`bool[B]`)."""
        return self._kept(self, rows, None).replace(due=jnp.where(rows, self.length + self._every, self.due))

    @property
    def _every(self) -> int:
        return self.size if self.kind.every is None else self.kind.every

    def _kept(self, into: Evicting, rows: Array, prompt: ReadPrompt | None) -> Evicting:
        """Returns `into`, an empty cache or this one, with the tokens that the rule keeps in `rows` (`bool[B]`)."""
        depth, made, selection = len(self.kv), [], self.kind.selection
        since = self.length if self.whole else self.due - self._every
        began = self.length if self.whole else self.prompt_length
        gathered = self.gathered if prompt is None else selection.score.consult(self, prompt)
        layers, parts = [], []
        for layer, table in enumerate(self.kind.tables(self.size, depth, self.shapes)):
            projections = None
            if selection.projects:
                assert prompt is not None
                projections = outputs(prompt.model, prompt.params, layer)
            parts.append(functools.partial(held_of, selection.score, layer, depth, self.shapes[layer], projections))
            own: tuple[Any, ...] = (self.kv[layer], self.positions[layer], self.starts[layer], self.count[layer],
                                    self.queries[layer], gathered[layer])
            number = jnp.asarray(table)[jnp.minimum(self.length, self.size)]
            layers.append((own, self.length, began, since, number))
        some = [i for i in range(depth) if not self.kind.keeps_all(i, self.shapes[i])]
        chosen: dict[int, Array] = {}
        # row by row, since scores are large
        if selection.compares:
            each = lambda rows: selection.choose_all([parts[i](row) for i, row in zip(some, rows, strict=True)],
                                                     [row[-1] for row in rows])
            chosen = dict(zip(some, lax.map(each, [layers[i] for i in some]), strict=True)) if some else {}
        for layer, (part, held) in enumerate(zip(parts, layers, strict=True)):
            room = None if into.starts[layer] is None else self.kind.later(self.size)
            one = functools.partial(compacted, selection, part, into.positions[layer].shape[1:], room, self.size,
                                    self.kind.close_up)
            made.append(lax.map(one, (held, rows & (layer in some), chosen.get(layer))))
        kv, positions, starts, count, slots = zip(*made, strict=True)
        into = into.replace(kv=kv, positions=positions, starts=starts, count=count, length=self.length)
        if not into._chooses:
            return into
        gathered = tuple(own.replace(slots=new) for own, new in zip(self.gathered, slots, strict=True))
        return into.replace(queries=self.queries, gathered=gathered)

    def prefill_cache(self) -> Evicting:
        return self.kind.empty(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given,
                               whole=True) if self.kv else self

    def finish_prefill(self, prompt: ReadPrompt) -> Evicting:
        if not self.kv:
            return self
        into = self.kind.empty(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given)
        return self._kept(into, jnp.ones(self.length.shape, bool), prompt).replace(
            due=self.length + self._every, prompt_length=self.length)

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return TreeBuffer.empty(self, entries, room)


@dataclasses.dataclass(frozen=True)
class Eviction(KVConfig):
    """Configuration of a cache that evicts: a selection with its score, and a budget.

    Attributes:
        selection: the rule that chooses the tokens to keep.
        budget: number of tokens that each head of a layer keeps; below 1, their share of the text. A tuple has one such
            number for each layer. A string such as "64MB" is the number of bytes of a row after prefill: keys, values
            and positions, without layers that keep all tokens.
        every: number of tokens between two evictions. None: all tokens after the prompt are kept.
        skip: numbers of layers that keep all tokens.
        close_up: whether the keys of the prompt's kept tokens are rotated as if there were no gaps between the tokens.
        new: maximum number of tokens after the prompt, set by `with_length`. None: not known.
        name: name in error messages.
    """

    selection: Selection
    budget: Budget | tuple[Budget, ...]
    every: int | None = None
    skip: tuple[int, ...] = ()
    close_up: bool = False
    new: int | None = None
    name: str = "eviction"

    def __post_init__(self) -> None:
        if isinstance(self.budget, str):
            in_bytes(self.budget, takes=TAKES)
        else:
            for budget in self.budget if isinstance(self.budget, tuple) else (self.budget,):
                self._check(budget)
        if self.every is not None and self.every < 1:
            raise ValueError(f"every: got {self.every}, takes 1 or more, or None")
        once = self.close_up or self.selection.projects or self.selection.score.once
        if self.every is not None and once:
            raise ValueError(f"every: got {self.every}; {self.name} chooses once, after the prompt; takes None")

    def _check(self, budget: Budget) -> None:
        """Raises ValueError if `budget` is not a number or share of tokens, or not larger than the number of tokens
        that the score always keeps."""
        tokens = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
        if not tokens and not (isinstance(budget, float) and 0 < budget < 1):
            raise ValueError(f"budget: got {budget!r}, takes {TAKES}")
        if isinstance(budget, int) and budget <= (always := self.selection.score.always):
            raise ValueError(f"budget: got {budget}, takes more than the {always} tokens that {self.name} keeps in any "
                             "case")

    def with_length(self, new: int) -> Eviction:
        return dataclasses.replace(self, new=new)

    def of_model(self, lm: Any) -> Eviction:
        return dataclasses.replace(self, selection=self.selection.of_model(lm))

    def beyond(self, longest: int) -> int:
        return self.selection.score.beyond(longest)

    def takes_latents(self) -> bool:
        # Other selections divide a budget among heads, whose keys may then be packed beside their values.
        return isinstance(self.selection, Top) and self.selection.score.latents and not (
            self.close_up or self.selection.projects)

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        score = self.selection.score
        # At queries and keys; and a choice of latents is made among slots that are positions.
        looks = score.latest or score.reads != "nothing" or shape.value_width == 0
        return frozenset(("soft caps", "biases")) if looks else frozenset()

    def keeps_all(self, layer: int, shape: KVLayer) -> bool:
        """Returns True for layers that keep all tokens: those in `skip`, and those with a sliding window."""
        return layer in self.skip or shape.sliding is not None

    def tables(self, size: int, depth: int, shapes: Sequence[KVLayer]) -> Sequence[np.ndarray]:
        """Returns a table for each layer: entry `n` is the number of tokens that it keeps of a text of `n` tokens,
        `i32[size + 1]`."""
        everything = np.arange(size + 1, dtype=np.int32)
        found = tables(self.selection, self.budget, size, depth)
        return [everything if self.keeps_all(layer, shapes[layer]) else found[layer] for layer in range(depth)]

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree,
              whole: bool = False) -> Evicting:
        """Returns an empty cache; with `whole=True`, the one for prefill."""
        if isinstance(self.budget, str):
            return self._in_tokens(self.budget, shapes, dtype).empty(shapes, batch, size, dtype, inputs, whole)
        self.selection.check(shapes)
        score, depth, chooses = self.selection.score, len(shapes), whole or self.every is not None
        later, at, packs = self.later(size), [], []
        for layer, (table, shape) in enumerate(zip(self.tables(size, depth, shapes), shapes, strict=True)):
            total = None if whole or self.keeps_all(layer, shape) else self.selection.together(
                table, shape.heads, layer)
            n = size if whole else min(size, self.selection.slots(table, shape.heads) + later)
            packs.append(total is not None)
            at.append((shape.heads, whole_blocks(n)) if total is None else
                      (segments_of(total, shape.heads, later, size), SEGMENT))
        heads = [(batch, shape.heads) for shape in shapes]
        return Evicting(
            kv=tuple(jnp.zeros((batch, *slots, shape.both), dtype) for shape, slots in zip(shapes, at, strict=True)),
            positions=tuple(jnp.full((batch, *slots), -1, jnp.int32) for slots in at),
            starts=tuple(jnp.zeros(h, jnp.int32) if one else None for h, one in zip(heads, packs, strict=True)),
            count=tuple(jnp.zeros(h, jnp.int32) for h in heads),
            queries=tuple(jnp.zeros((batch, shape.queries or shape.heads, score.latest if chooses else 0, shape.width),
                                    dtype) for shape in shapes),
            gathered=tuple(_start(score, shape, batch, slots, one) if chooses else Gathered()
                           for shape, slots, one in zip(shapes, at, packs, strict=True)),
            length=jnp.zeros(batch, jnp.int32), prompt_length=jnp.zeros(batch, jnp.int32),
            due=jnp.full(batch, self.every or size, jnp.int32), given=inputs,
            widths=key_widths(shapes), size=size, shapes=shapes, kind=self, whole=whole)

    def later(self, size: int) -> int:
        """Returns the maximum number of tokens that are added to a head after an eviction and before the next one, in
        texts of up to `size` tokens. If there is only one eviction, all tokens after the prompt count."""
        return min(size, self.every or size if self.new is None else self.every or self.new)

    def _in_tokens(self, budget: str, shapes: Sequence[KVLayer], dtype: Any) -> Eviction:
        """Returns this configuration with a budget in tokens in place of the `budget` in bytes."""
        each = sum(shape.heads * (shape.both * jnp.dtype(dtype).itemsize + 4) for layer, shape in enumerate(shapes)
                   if not self.keeps_all(layer, shape))
        tokens = in_bytes(budget) // max(each, 1)
        if each and tokens <= self.selection.score.always:
            raise ValueError(f"budget: got {budget}, {tokens} tokens of this model, takes more than the "
                             f"{self.selection.score.always} that {self.name} keeps in any case")
        return dataclasses.replace(self, budget=max(tokens, self.selection.score.always + 1))


def _start(score: TokenScore, shape: KVLayer, batch: int, slots: tuple[int, int], packs: bool) -> Gathered:
    """Returns the statistics of an empty layer with slots `[G, S]`, or `[N, SEGMENT]` if heads are packed."""
    one = score.start(shape, batch, slots[1])
    return one if not packs else one.replace(slots=jax.tree.map(
        lambda x: jnp.zeros((batch, *slots, *x.shape[3:]), x.dtype), one.slots))
