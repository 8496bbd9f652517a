"""A cache that keeps some of the tokens: what published policies of eviction have in common.

A prompt is read into a whole cache. When it is in, the rule chooses what stays, and the rounds go on with arrays of
just that size and room for the tokens to come. Those all stay (most papers), or the rule runs again each `every`
tokens.

What is held depends on the committed tokens alone: rounds commit no more tokens than there are to the next choice
(`Cache.horizon`), and only what was committed is counted. So drafts, trees and chunks change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, KVLayer, key_widths
from decodax.cache.packed_heads import SEGMENT, pack, segment_attention, segments_of, slots_of, unpack
from decodax.cache.scratch import Scratch
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.query_scores import moved
from decodax.caches.evict.scores import Gathered, Taken, TokenScore
from decodax.caches.evict.selection import Budget, Selection, in_bytes, layers_of
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Draftable, Entries, PyTree, ReadPrompt
from decodax.pallas_kernels.window_attention import BLOCK, Bias, merge, window_attention, window_attention_lse

TAKES = "a number of tokens from 1, a share of the text between 0 and 1, or bytes as '64MB'; or one of the first two " \
    "for each layer"
"""Of budgets, for errors."""


@struct
class Evicting(KeyValues):
    """Keys and values of the tokens that were kept; each head's lie in the order of their positions, without gaps.

    Attributes:
        kv, given, widths: see `KeyValues`; layers may have different numbers of slots. Where the heads of a layer keep
            different numbers of tokens, `G, S` are `N, SEGMENT` in this and the next (`decodax.cache.packed_heads`).
        positions: a tuple of one `i32[B, G, S]` a layer; -1 where a slot is empty.
        starts: a tuple of one `i32[B, G]` a layer, the first segment of each head; None where there are no segments.
        count: a tuple of one `i32[B, G]` a layer, how many slots are filled.
        queries: a tuple of one `f[B, H, w, d]` a layer, those of the latest tokens, that of position `p` at `p % w`.
        gathered: a tuple of what the score has gathered of each layer.
        length: `i32[B]` tokens of the verified text. settled_at: `i32[B]`, how many there were behind the prompt. due:
            `i32[B]`, the length at which the rule chooses next.
        size: static; the most tokens of a text. kind: static. whole: static; whether it is a prompt's.
    """

    kv: tuple[Array, ...]
    positions: tuple[Array, ...]
    starts: tuple[Array | None, ...]
    count: tuple[Array, ...]
    queries: tuple[Array, ...]
    gathered: tuple[Gathered, ...]
    length: Array
    settled_at: Array
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

    def horizon(self) -> Array | None:
        return None if self.whole else self.due - self.length

    def room(self, running: Array) -> Array | None:
        if self.whole or self.kind.every is not None or not self.kv:
            return None
        free = [self._free(layer) for layer in range(len(self.kv))]
        return functools.reduce(jnp.minimum, free)

    def _free(self, layer: int) -> Array:
        """`i32[B]`: how many more tokens each head of a layer can take in."""
        kv, count, starts = self.kv[layer], self.count[layer], self.starts[layer]
        if starts is None:
            return kv.shape[2] - count.max(1)
        ends = jnp.concatenate([starts[:, 1:], jnp.full((len(starts), 1), kv.shape[1], jnp.int32)], 1)
        return ((ends - starts) * SEGMENT - count).min(1)

    def heads(self, layer: int) -> tuple[Array, Array]:
        """A layer's keys and values, `f[B, G, S, d + e]`, and their positions, `i32[B, G, S]`, each head's tokens in
        front and -1 behind them."""
        kv, positions, starts = self.kv[layer], self.positions[layer], self.starts[layer]
        if starts is None:
            return kv, positions
        slots = min(self.size, positions[0].size)
        row = lambda kv, positions, starts, count: (unpack(kv, starts, count, slots),
                                                    unpack(positions, starts, count, slots, -1))
        return jax.vmap(row)(kv, positions, starts, self.count[layer])

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if window.certain and not self.whole:
            raise ValueError(f"cache: {self.kind.name} reads a prompt as a whole, which only the model that answers "
                             "does; a draft model takes another cache")
        score = self.kind.selection.score
        if (softcap is not None or bias is not None) and (score.latest or score.reads != "nothing"):
            raise ValueError(f"cache: {self.kind.name} scores tokens by queries and keys alone; takes a model without "
                             "a soft cap or a bias of its attention scores, or a policy that looks at no queries")
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias,
                                       key_positions=window.key_positions)
        given: tuple[Any, ...] = (q, k, v, window.visible(), window.positions)
        packed = self.starts[layer]
        if packed is not None and sliding is None and bias is None:
            near = window_attention_lse(*given, **options)
            far = segment_attention(q, self.kv[layer], self.positions[layer] >= 0, packed, scale=scale, softcap=softcap)
            return merge(near, far)[0], self._entry(q, k, v, scale)
        kv, positions = self.heads(layer)
        given = (*given, kv)
        if self.kind.selection.uniform and sliding is None and bias is None:
            options["length"] = self.count[layer][:, 0]
        else:
            options["slot_positions"] = positions
        own = lambda x: x[:, k.shape[1] - q.shape[1]:]
        if self.whole and score.reads == "attention":
            out, sums = window_attention_lse(*given, **options)
            return out, (own(k), own(v), q * scale, sums)
        return window_attention(*given, **options), self._entry(q, k, v, scale)

    def _entry(self, q: Array, k: Array, v: Array, scale: float) -> PyTree:
        score, own = self.kind.selection.score, k.shape[1] - q.shape[1]
        asks = self._chooses and (score.latest or score.reads == "queries")
        return k[:, own:], v[:, own:], *([q * scale] if asks else [])

    @property
    def _chooses(self) -> bool:
        """Whether there is another choice to come."""
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
        both = jnp.concatenate(entry[:2], -1)
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
                queries, entry[2].swapaxes(1, 2), at)
        if (self.whole and score.reads == "attention") or (self._chooses and score.reads == "queries"):
            seen = (kv, held) if starts is None else self.replace(
                kv=(kv,), positions=(held,), starts=(starts,), count=(count + number[:, None],)).heads(0)
            sums = entry[3] if score.reads == "attention" else jnp.zeros(entry[2].shape[:3], jnp.float32)
            gathered = score.gather(self.shapes[layer], gathered, Taken(
                queries=entry[2], sums=sums, positions=slots, kv=seen[0], held=seen[1]))
        return kv, held, count + number[:, None], queries, gathered

    def _chosen(self, rows: Array) -> Evicting:
        """With what the rule keeps, in those `rows` (`bool[B]`)."""
        return self._kept(self, rows, None).replace(due=jnp.where(rows, self.length + self._every, self.due))

    @property
    def _every(self) -> int:
        return self.size if self.kind.every is None else self.kind.every

    def _kept(self, into: Evicting, rows: Array, prompt: ReadPrompt | None) -> Evicting:
        """`into`, an empty cache or this one, with what the rule keeps of this one in those `rows`."""
        depth, made, selection = len(self.kv), [], self.kind.selection
        since = self.length if self.whole else self.due - self._every
        began = self.length if self.whole else self.settled_at
        gathered = self.gathered if prompt is None else selection.score.consult(self, prompt)
        layers, parts = [], []
        for layer, table in enumerate(self.kind.tables(self.size, depth, self.shapes)):
            outputs = None
            if selection.score.projects:
                assert prompt is not None
                outputs = prompt.model.outputs(prompt.params, layer)
            parts.append(functools.partial(held_of, self.kind, layer, depth, self.shapes[layer], outputs))
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
            one = functools.partial(_layer, self.kind, part, into.positions[layer].shape[1:],
                                    into.starts[layer] is not None, self.size)
            made.append(lax.map(one, (held, rows & (layer in some), chosen.get(layer))))
        kv, positions, starts, count, slots = zip(*made, strict=True)
        into = into.replace(kv=kv, positions=positions, starts=starts, count=count, length=self.length)
        if not into._chooses:
            return into
        gathered = tuple(own.replace(slots=new) for own, new in zip(self.gathered, slots, strict=True))
        return into.replace(queries=self.queries, gathered=gathered)

    def for_prompt(self) -> Evicting:
        return self.kind.empty(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given,
                               whole=True) if self.kv else self

    def settled(self, prompt: ReadPrompt) -> Evicting:
        if not self.kv:
            return self
        into = self.kind.empty(self.shapes, self.length.shape[0], self.size, self.kv[0].dtype, self.given)
        return self._kept(into, jnp.ones(self.length.shape, bool), prompt).replace(
            due=self.length + self._every, settled_at=self.length)

    def scratch(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)


def held_of(kind: Eviction, layer: int, depth: int, shape: KVLayer, outputs: Array | None,
            row: tuple[Any, ...]) -> HeldLayer:
    """What the rule sees of a layer of one row."""
    (kv, positions, starts, count, ring, gathered), length, began, since, _ = row
    if starts is not None:
        spread = functools.partial(unpack, starts=starts, count=count, slots=positions.size)
        kv, positions = spread(kv), spread(positions, empty=-1)
        gathered = gathered.replace(slots=jax.tree.map(spread, gathered.slots))
    w = ring.shape[1]
    order = (length + jnp.arange(w, dtype=jnp.int32)) % max(w, 1)       # the oldest first
    f32 = lambda x: x.astype(jnp.float32)
    held = HeldLayer(keys=f32(kv[..., :shape.width]), values=f32(kv[..., shape.width:]), positions=positions,
                     count=count, length=length, settled_at=began, since=since,
                     queries=f32(ring[:, order].swapaxes(0, 1)),
                     gathered=gathered, outputs=outputs, layer=layer, depth=depth, shape=shape)
    return held.replace(gathered=gathered.replace(slots=kind.selection.score.renew(held)))


def _layer(kind: Eviction, part: Callable[[Any], HeldLayer], shape: tuple[int, ...], packs: bool, size: int,
           row: tuple[Any, ...]) -> tuple[Array, Array, Array | None, Array, Any]:
    """A layer of one row with what stays, in slots of that shape, `[G, S]` or (`packs`) `[N, SEGMENT]`; `part` makes of
    a row what the rule sees, `size` is the most that a head may have."""
    own, choose, chosen = row
    held, (kv, positions, before, count, _, gathered) = part(own), own[0]
    stays = kind.selection.choose(held, own[-1]) if chosen is None else chosen
    stays = jnp.where(choose, stays, held.valid)
    first = jnp.argsort(~stays, axis=-1, stable=True)
    number = stays.sum(-1, dtype=jnp.int32)
    spread = lambda x: x if before is None else unpack(x, before, count, held.slots)
    # a row that does not choose now has its latest queries counted when it does
    slots_of = jax.tree.map(lambda new, old: jnp.where(choose, new, spread(old)), held.gathered.slots, gathered.slots)
    starts: Array | None = None
    if packs:
        starts, head, source = pack(first, number, kind.later(size), size, shape[0])
        filled, rank = (source >= 0).reshape(shape), jnp.arange(shape[0] * shape[1]) - starts[head] * shape[1]
        move = lambda x: x[head, jnp.maximum(source, 0)].reshape(*shape, *x.shape[2:])
        number_of, rank = number[head].reshape(shape), rank.reshape(shape)
    else:
        first = first[:, :shape[1]] if shape[1] <= first.shape[1] else jnp.pad(
            first, ((0, 0), (0, shape[1] - first.shape[1])))
        rank = jnp.arange(shape[1], dtype=jnp.int32)
        filled, number_of = rank < number[:, None], number[:, None]
        move = lambda x: jnp.take_along_axis(x, first.reshape(*first.shape, *[1] * (x.ndim - 2)), 1)
    kv, at = move(spread(kv)), jnp.where(filled, move(spread(positions)), -1)
    if kind.close_up:
        # the kept tokens as if they were the latest ones: keys are turned by the distance to their new positions
        by = jnp.where(filled, held.length - number_of + rank - at, 0)
        keys = jax.vmap(functools.partial(moved, held.shape))(kv[:, :, None, :held.shape.width], by)[:, :, 0]
        kv = jnp.concatenate([keys, kv[..., held.shape.width:]], -1)
    slots_of = jax.tree.map(lambda x: jnp.where(filled, move(x), 0), slots_of)
    if before is None:
        return kv, at, starts, number, slots_of
    # what a row has that does not choose lies where it lies: it has taken in some of the tokens that it has room for
    keep = lambda new, old: jnp.where(choose, new, old)
    return (keep(kv, own[0][0]), keep(at, positions), keep(starts, before), number,
            jax.tree.map(keep, slots_of, gathered.slots))


@dataclasses.dataclass(frozen=True)
class Eviction(CacheConfig):
    """A kind of cache that evicts.

    Attributes:
        selection: what stays.
        budget: tokens that each head of a layer keeps, or (below 1) their share of the text; or a tuple with one of
            them for each layer; or bytes of what a row's layers keep of a prompt, those left out that keep everything
            ("64MB", keys, values and positions counted).
        every: the rule runs again each so many tokens; None: the tokens behind the prompt all stay.
        skip: layers that keep everything.
        close_up: keys are rotated as if what is kept of the prompt stood without gaps in front of what follows.
        new: how many tokens there will be behind the prompt at most (`fit`); None: not known.
        name: what errors call it.
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
        if self.every is not None and (self.close_up or self.selection.score.once):
            raise ValueError(f"every: got {self.every}; {self.name} chooses once, behind the prompt; takes None")

    def _check(self, budget: Budget) -> None:
        tokens = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
        if not tokens and not (isinstance(budget, float) and 0 < budget < 1):
            raise ValueError(f"budget: got {budget!r}, takes {TAKES}")
        if isinstance(budget, int) and budget <= (always := self.selection.score.always):
            raise ValueError(f"budget: got {budget}, takes more than the {always} tokens that {self.name} keeps in any "
                             "case")

    def fit(self, new: int) -> Eviction:
        return dataclasses.replace(self, new=new)

    def of_model(self, lm: Any) -> Eviction:
        return dataclasses.replace(self, selection=self.selection.of_model(lm))

    def beyond(self, longest: int) -> int:
        return self.selection.score.beyond(longest)

    def keeps_all(self, layer: int, shape: KVLayer) -> bool:
        """Whether a layer keeps everything: it was asked for, or the layer sees a sliding window alone."""
        return layer in self.skip or shape.sliding is not None

    def tables(self, size: int, depth: int, shapes: Sequence[KVLayer]) -> Sequence[np.ndarray]:
        """How many tokens each layer keeps of a text of each length up to `size`."""
        everything = np.arange(size + 1, dtype=np.int32)
        found = _tables(self.selection, self.budget, size, depth)
        return [everything if self.keeps_all(layer, shapes[layer]) else found[layer] for layer in range(depth)]

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree,
              whole: bool = False) -> Evicting:
        """An empty cache; `whole`: one for a prompt."""
        if isinstance(self.budget, str):
            return self._in_tokens(self.budget, shapes, dtype).empty(shapes, batch, size, dtype, inputs, whole)
        score, depth, chooses = self.selection.score, len(shapes), whole or self.every is not None
        later, at, packs = self.later(size), [], []
        for layer, (table, shape) in enumerate(zip(self.tables(size, depth, shapes), shapes, strict=True)):
            total = None if whole or self.keeps_all(layer, shape) else self.selection.together(
                table, shape.heads, layer)
            n = size if whole else min(size, self.selection.slots(table, shape.heads) + later)
            packs.append(total is not None)
            at.append((shape.heads, n if n <= BLOCK else -(-n // BLOCK) * BLOCK) if total is None else
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
            length=jnp.zeros(batch, jnp.int32), settled_at=jnp.zeros(batch, jnp.int32),
            due=jnp.full(batch, self.every or size, jnp.int32), given=inputs,
            widths=key_widths(shapes), size=size, shapes=shapes, kind=self, whole=whole)

    def later(self, size: int) -> int:
        """How many tokens a head takes in between two choices, or behind the only one."""
        return min(size, self.every or size if self.new is None else self.every or self.new)

    def _in_tokens(self, budget: str, shapes: Sequence[KVLayer], dtype: Any) -> Eviction:
        """This kind with a budget in tokens."""
        each = sum(shape.heads * (shape.both * jnp.dtype(dtype).itemsize + 4) for layer, shape in enumerate(shapes)
                   if not self.keeps_all(layer, shape))
        tokens = in_bytes(budget) // max(each, 1)
        if each and tokens <= self.selection.score.always:
            raise ValueError(f"budget: got {budget}, {tokens} tokens of this model, takes more than the "
                             f"{self.selection.score.always} that {self.name} keeps in any case")
        return dataclasses.replace(self, budget=max(tokens, self.selection.score.always + 1))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)


def _start(score: TokenScore, shape: KVLayer, batch: int, slots: tuple[int, int], packs: bool) -> Gathered:
    """What a score gathers of an empty layer with such slots."""
    one = score.start(shape, batch, slots[1])
    return one if not packs else one.replace(slots=jax.tree.map(
        lambda x: jnp.zeros((batch, *slots, *x.shape[3:]), x.dtype), one.slots))


@functools.lru_cache(maxsize=32)
def _tables(selection: Selection, budget: Budget | tuple[Budget, ...], size: int, depth: int) -> Sequence[np.ndarray]:
    return layers_of(selection, budget, size, depth)
