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

from decodax.cache.base import Cache, CacheConfig, Draftable, Entries, PyTree, ReadPrompt
from decodax.cache.dense import write
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv, key_widths
from decodax.cache.scratch import Scratch
from decodax.kvcache.held import HeldLayer
from decodax.kvcache.query_scores import moved
from decodax.kvcache.scores import Gathered, Taken
from decodax.kvcache.selection import Budget, Selection, in_bytes, layers_of
from decodax.pallas_kernels.window_attention import BLOCK, Bias, window_attention, window_attention_lse
from decodax.struct import static, struct


@struct
class Evicting(KeyValues):
    """Keys and values of the tokens that were kept; each head's lie in the order of their positions, without gaps.

    Attributes:
        kv, given, widths: see `KeyValues`; layers may have different numbers of slots.
        positions: a tuple of one `i32[B, G, S]` a layer; -1 where a slot is empty.
        count: a tuple of one `i32[B, G]` a layer, how many slots are filled.
        queries: a tuple of one `f[B, H, w, d]` a layer, those of the latest tokens, that of position `p` at `p % w`.
        gathered: a tuple of what the score has gathered of each layer.
        length: `i32[B]` tokens of the verified text. settled_at: `i32[B]`, how many there were behind the prompt. due:
            `i32[B]`, the length at which the rule chooses next.
        size: static; the most tokens of a text. kind: static. whole: static; whether it is a prompt's.
    """

    kv: tuple[Array, ...]
    positions: tuple[Array, ...]
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
        free = [kv.shape[2] - count.max(1) for kv, count in zip(self.kv, self.count, strict=True)]
        return functools.reduce(jnp.minimum, free)

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
        given = (q, k, v, window.visible(), window.positions, self.kv[layer])
        if self.kind.selection.uniform and sliding is None and bias is None:
            options["length"] = self.count[layer][:, 0]
        else:
            options["slot_positions"] = self.positions[layer]
        own = lambda x: x[:, k.shape[1] - q.shape[1]:]
        if self.whole and score.reads == "attention":
            out, sums = window_attention_lse(*given, **options)
            return out, (own(k), own(v), q * scale, sums)
        out = window_attention(*given, **options)
        return out, (own(k), own(v), *([q * scale] if self._chooses and (score.latest or score.reads == "queries")
                                       else []))

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
        B, G, S = held.shape
        wanted = slots >= 0
        put = jax.vmap(jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop")))
        rank = jnp.cumsum(wanted, 1, dtype=jnp.int32) - 1
        number = wanted.sum(1, dtype=jnp.int32)
        both = jnp.concatenate(entry[:2], -1)
        if self.kind.selection.uniform:
            to = jnp.where(wanted, count[:, :1] + rank, -1)
            kv = write(self.kv[layer], both, to)
            to = jnp.broadcast_to(jnp.where(to < 0, S, to)[:, None], (B, G, to.shape[1]))
        else:
            to = jnp.where(wanted[:, None], count[:, :, None] + rank[:, None], S)
            kv = put(self.kv[layer], both.swapaxes(1, 2), to)
        held = put(held, jnp.broadcast_to(slots[:, None], to.shape), to)
        queries, gathered = self.queries[layer], self.gathered[layer]
        if (w := queries.shape[2]):
            newest = jnp.maximum(slots.max(1), self.length - 1)[:, None]
            at = jnp.where(wanted & (slots > newest - w), slots % w, w)
            queries = jax.vmap(lambda ring, new, at: ring.at[:, at].set(new.astype(ring.dtype), mode="drop"))(
                queries, entry[2].swapaxes(1, 2), at)
        if (self.whole and score.reads == "attention") or (self._chooses and score.reads == "queries"):
            sums = entry[3] if score.reads == "attention" else jnp.zeros(entry[2].shape[:3], jnp.float32)
            gathered = score.gather(self.shapes[layer], gathered, Taken(
                queries=entry[2], sums=sums, positions=slots, kv=kv, held=held))
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
            parts.append(functools.partial(_held, self.kind, layer, depth, self.shapes[layer], outputs))
            own = (self.kv[layer], self.positions[layer], self.count[layer], self.queries[layer], gathered[layer])
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
            one = functools.partial(_layer, self.kind, part, into.kv[layer].shape[2])
            made.append(lax.map(one, (held, rows & (layer in some), chosen.get(layer))))
        kv, positions, count, slots = zip(*made, strict=True)
        into = into.replace(kv=kv, positions=positions, count=count, length=self.length)
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


def _held(kind: Eviction, layer: int, depth: int, shape: KVLayer, outputs: Array | None,
          row: tuple[Any, ...]) -> HeldLayer:
    """What the rule sees of a layer of one row."""
    (kv, positions, count, ring, gathered), length, began, since, _ = row
    w = ring.shape[1]
    order = (length + jnp.arange(w, dtype=jnp.int32)) % max(w, 1)       # the oldest first
    f32 = lambda x: x.astype(jnp.float32)
    held = HeldLayer(keys=f32(kv[..., :shape.width]), values=f32(kv[..., shape.width:]), positions=positions,
                     count=count, length=length, settled_at=began, since=since,
                     queries=f32(ring[:, order].swapaxes(0, 1)),
                     gathered=gathered, outputs=outputs, layer=layer, depth=depth, shape=shape)
    return held.replace(gathered=gathered.replace(slots=kind.selection.score.renew(held)))


def _layer(kind: Eviction, part: Callable[[Any], HeldLayer], slots: int,
           row: tuple[Any, ...]) -> tuple[Array, Array, Array, Any]:
    """A layer of one row with what stays, in so many slots; `part` makes of a row what the rule sees."""
    own, choose, chosen = row
    held, (kv, positions, _, _, gathered) = part(own), own[0]
    length, shape = held.length, held.shape
    stays = kind.selection.choose(held, own[-1]) if chosen is None else chosen
    stays = jnp.where(choose, stays, held.valid)
    first = jnp.argsort(~stays, axis=-1, stable=True)
    first = first[:, :slots] if slots <= first.shape[1] else jnp.pad(first, ((0, 0), (0, slots - first.shape[1])))
    number = stays.sum(-1, dtype=jnp.int32)
    filled = jnp.arange(slots, dtype=jnp.int32) < number[:, None]
    move = lambda x: jnp.take_along_axis(x, first.reshape(*first.shape, *[1] * (x.ndim - 2)), 1)
    kv = move(kv)
    if kind.close_up:
        # the kept tokens as if they were the latest ones: keys are turned by the distance to their new positions
        by = jnp.where(filled, length - number[:, None] + jnp.arange(slots, dtype=jnp.int32) - move(positions), 0)
        keys = jax.vmap(functools.partial(moved, shape))(kv[:, :, None, :shape.width], by)[:, :, 0]
        kv = jnp.concatenate([keys, kv[..., shape.width:]], -1)
    # a row that does not choose now has its latest queries counted when it does
    slots_of = jax.tree.map(lambda new, old: jnp.where(choose, new, old), held.gathered.slots, gathered.slots)
    return (kv, jnp.where(filled, move(positions), -1), number,
            jax.tree.map(lambda x: jnp.where(filled, move(x), 0), slots_of))


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
            in_bytes(self.budget)
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
            raise ValueError(f"budget: got {budget!r}, takes a number of tokens from 1, a share of the text between 0 "
                             "and 1, or bytes as '64MB'; or one of the first two for each layer")
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
        later = min(size, self.every or size if self.new is None else self.every or self.new)
        slots = [size if whole else min(size, self.selection.slots(table, shape.heads) + later)
                 for table, shape in zip(self.tables(size, depth, shapes), shapes, strict=True)]
        slots = [n if n <= BLOCK else -(-n // BLOCK) * BLOCK for n in slots]
        heads = [(batch, shape.heads) for shape in shapes]
        return Evicting(
            kv=tuple(empty_kv([shape], batch, n, dtype)[0] for shape, n in zip(shapes, slots, strict=True)),
            positions=tuple(jnp.full((*h, n), -1, jnp.int32) for h, n in zip(heads, slots, strict=True)),
            count=tuple(jnp.zeros(h, jnp.int32) for h in heads),
            queries=tuple(jnp.zeros((batch, shape.queries or shape.heads, score.latest if chooses else 0, shape.width),
                                    dtype) for shape in shapes),
            gathered=tuple(score.start(shape, batch, n) if chooses else Gathered()
                           for shape, n in zip(shapes, slots, strict=True)),
            length=jnp.zeros(batch, jnp.int32), settled_at=jnp.zeros(batch, jnp.int32),
            due=jnp.full(batch, self.every or size, jnp.int32), given=inputs,
            widths=key_widths(shapes), size=size, shapes=shapes, kind=self, whole=whole)

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


@functools.lru_cache(maxsize=32)
def _tables(selection: Selection, budget: Budget | tuple[Budget, ...], size: int, depth: int) -> Sequence[np.ndarray]:
    return layers_of(selection, budget, size, depth)
