"""Caches written from the contract: attention sinks (StreamingLLM), eviction by accumulated attention (H2O), a pool of
pages (PagedAttention) and a wrapper that counts.

All of it runs as one program, `tests/extending` runs it, and the pages of docs/extending explain the contracts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

import decodax as dx
from decodax.cache import Slotted, TreeBuffer, Wrapper, empty_kv, empty_slots, own_entry
from decodax.cache.entry import MeasuredEntry
from decodax.common.struct import static, struct
from decodax.core.cache import Layout
from decodax.core.capabilities import DraftBase
from decodax.models.config import llama
from decodax.models.rope import Rope, rotate
from decodax.models.transformer import Transformer
from decodax.pallas_kernels.window_attention import merge, slot_weights, window_attention, window_attention_lse

config = llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256)
network = Transformer(config)
weights = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, network.init_params(jax.random.key(5)))
lm = dx.LM(model=network, params=weights, vocab_size=16)
prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2, 7, 1, 8, 2, 8]]


@struct
class SinkCache(Slotted):
    """The first `sinks` tokens and the latest `recent` ones, at positions counted in the cache."""

    sinks: int = static()
    recent: int = static()
    rope: Rope = static()

    supports = frozenset({"trees"})

    def place(self, layer, entry, positions):
        newest = jnp.maximum(positions.max(1), self.length - 1)[:, None]
        ring = self.sinks + (positions - self.sinks) % self.recent
        ring = jnp.where(positions > newest - self.recent, ring, -1)          # a prompt may be longer than the ring
        return jnp.where(positions < self.sinks, positions, ring)[:, None]    # the same slots in every head

    def attend(self, layer, q, k, v, window, *, scale, sliding=None, softcap=None):
        if sliding is not None:
            raise ValueError(f"cache: layer {layer} has a window of its own; a SinkCache takes layers that see all")
        at, keys_at, held = window.positions, window.key_positions, self.positions[layer]

        def part(q, is_sink, sliding):
            seen = window.visible() & is_sink(keys_at)[:, None]
            slots = jnp.where(is_sink(held), held, -1)                        # -1: not seen
            return window_attention_lse(q, k, v, seen, at, self.kv[layer], scale=scale, softcap=softcap,
                                        sliding=sliding, key_positions=keys_at, slot_positions=slots)

        back = jnp.minimum(at, self.sinks + self.recent - 1) - at             # from its position to its cache index
        turned = rotate(q, *self.rope.table(back), interleaved=self.rope.interleaved)
        ring = part(q, lambda at: at >= self.sinks, self.recent)
        out, _ = merge(ring, part(turned, lambda at: at < self.sinks, None))
        return out, own_entry(q, k, v)


@dataclasses.dataclass(frozen=True)
class Sinks:
    sinks: int
    recent: int
    rope: Rope

    def __call__(self, layers, batch, capacity, dtype, inputs=None):
        slots = empty_slots(layers, batch, capacity, dtype, inputs, slots=self.sinks + self.recent)
        return SinkCache(**slots, sinks=self.sinks, recent=self.recent, rope=self.rope)


sinks = Sinks(2, 6, config.layers[0].rope)
lookup = dx.Speculative(dx.drafts.PromptLookup(length=4))

plain = dx.generate(lm, prompts, cache=sinks, max_new_tokens=20)
drafted = dx.generate(lm, prompts, cache=sinks, max_new_tokens=20, algorithm=lookup)
assert (plain.tokens == drafted.tokens).all() and drafted.stats.accepted.sum() > 0


@struct
class HeavyHitterCache(Slotted):
    """The latest `recent` tokens, and the `heavy` ones that received the most attention.

    Attributes:
        mass: a tuple of one `f32[B, G, C]` a layer, the attention that each slot's token has received, summed over the
            queries of its group.
    """

    mass: tuple[Array, ...]
    heavy: int = static()
    recent: int = static()
    every: int = static()

    supports = frozenset({"trees"})

    def until(self, length):
        """How many tokens after the first `length` the next eviction comes."""
        kept = self.heavy + self.recent
        return jnp.where(length < kept, kept + self.every - length, self.every - (length - kept) % self.every)

    def max_commit(self):
        return self.until(self.length)

    def next(self, left):
        """Of the positions `left` (-1: none), those up to the next eviction."""
        first = jnp.where(left >= 0, left, self.size).min(1)
        return jnp.where(left < (first + self.until(first))[:, None], left, -1)

    def place(self, layer, entry, positions):
        empty = jnp.argsort(self.positions[layer] >= 0, axis=-1, stable=True)     # the empty slots come first
        rank = jnp.cumsum(positions >= 0, 1) - 1
        rank = jnp.broadcast_to(rank[:, None], (*empty.shape[:2], rank.shape[1]))
        return jnp.take_along_axis(empty, rank, axis=-1)

    def attend(self, layer, q, k, v, window, *, scale, sliding=None, softcap=None):
        if sliding is not None or softcap is not None:
            raise ValueError(f"cache: layer {layer} has a window or a softcap; a HeavyHitterCache takes neither")
        own = own_entry(q, k, v)
        entry = lambda lse: MeasuredEntry(own.keys, own.values, q * scale, lse)

        def look(cache, seen):
            return window_attention_lse(q, k, v, seen, window.positions, cache.kv[0], scale=scale,
                                        key_positions=window.key_positions, slot_positions=cache.positions[0])

        cache = self.layer(layer)
        if not window.is_prefill:
            out, lse = look(cache, window.visible())
            return out, entry(lse)

        def part(carry):
            cache, left, out, lse = carry
            now = cache.next(left)
            taken = now >= 0
            one, sums = look(cache, window.visible() & (taken[:, None, :] | jnp.eye(q.shape[1], dtype=bool)))
            out, lse = jnp.where(taken[..., None, None], one, out), jnp.where(taken[..., None], sums, lse)
            return cache.take((entry(lse),), now), jnp.where(taken, -1, left), out, lse

        left = jnp.where(window.live, window.positions, -1)
        nothing = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.zeros(q.shape[:3])
        _, _, out, lse = lax.while_loop(lambda carry: (carry[1] >= 0).any(), part, (cache, left, *nothing))
        return out, entry(lse)

    def layer(self, i):
        return self.replace(kv=self.kv[i:i + 1], widths=self.widths[i:i + 1], positions=self.positions[i:i + 1],
                            mass=self.mass[i:i + 1])

    def commit(self, entries, slots):
        def part(carry):
            cache, left = carry
            now = cache.next(left)
            return cache.take(entries, now), jnp.where(now >= 0, -1, left)

        return lax.while_loop(lambda carry: (carry[1] >= 0).any(), part, (self, slots))[0]

    def take(self, entries, positions):
        """Writes tokens up to an eviction, counts the attention that they pay, and evicts if it is time."""
        new = super().commit(entries, positions)
        mass = [old + paid(entry, positions, kv, held) for old, entry, kv, held in
                zip(new.mass, entries, new.kv, new.positions, strict=True)]
        kept = [new.stays(*layer) for layer in zip(mass, new.positions, strict=True)]
        held = tuple(jnp.where(stays, at, -1) for stays, at in zip(kept, new.positions, strict=True))
        return new.replace(positions=held, mass=tuple(jnp.where(stays, x, 0) for stays, x in
                                                      zip(kept, mass, strict=True)))

    def stays(self, mass, held):
        """Which slots are kept: all, or at an eviction `heavy + recent` of each head."""
        kept, length = self.heavy + self.recent, self.length[:, None, None]
        due = (length >= kept + self.every) & ((length - kept) % self.every == 0)
        worth = jnp.where(held >= length - self.recent, jnp.inf, mass)
        order = jnp.lexsort((held, jnp.where(held >= 0, -worth, jnp.inf)), axis=-1)     # the older one where they tie
        return (held >= 0) & (~due | (jnp.argsort(order, axis=-1) < kept))


def paid(entry, positions, kv, held):
    """The attention that committed nodes pay to each slot, up to their own: `f32[B, G, C]`."""
    # of a node that is not committed, whose position is -1, no slot is counted
    return slot_weights(entry.queries, entry.sums, positions, kv, slot_positions=held, scale=1.0, causal=True)


@dataclasses.dataclass(frozen=True)
class HeavyHitters:
    heavy: int
    recent: int
    every: int

    def __call__(self, layers, batch, capacity, dtype, inputs=None):
        slots = empty_slots(layers, batch, capacity, dtype, inputs, slots=self.heavy + self.recent + self.every)
        return HeavyHitterCache(**slots, mass=tuple(jnp.zeros(at.shape) for at in slots["positions"]),
                                heavy=self.heavy, recent=self.recent, every=self.every)


h2o = HeavyHitters(4, 4, 4)
plain = dx.generate(lm, prompts, cache=h2o, max_new_tokens=20)
drafted = dx.generate(lm, prompts, cache=h2o, max_new_tokens=20, algorithm=lookup)
assert (plain.tokens == drafted.tokens).all() and drafted.stats.accepted.sum() > 0


@struct
class PagedCache(DraftBase):
    """Keys and values in pages of a common pool.

    Attributes:
        kv: a tuple of one `f[N, G, P, d + e]` a layer, `N` pages of `P` positions.
        table: `i32[B, S / P]`, the page that holds each `P` positions of a row; -1: none yet.
        length: `i32[B]`.
    """

    kv: tuple[Array, ...]
    table: Array
    length: Array
    given: object

    supports = frozenset({"trees", "subsets"})
    layout = Layout(by_row=False)           # the pool has no batch axis

    @property
    def pages(self):
        return self.kv[0].shape[0]

    @property
    def page(self):
        return self.kv[0].shape[2]

    @property
    def capacity(self):
        return self.table.shape[1] * self.page

    @property
    def inputs(self):
        return self.given

    def free(self):
        """All pages, the free ones first, and how many those are."""
        used = jnp.zeros(self.pages, bool).at[jnp.where(self.table >= 0, self.table, self.pages)].set(True, mode="drop")
        return jnp.argsort(used, stable=True), (~used).sum()

    def claim(self, wanted):
        """The cache with free pages at the places `wanted` of the table (`bool[B, S / P]`), as far as there are any."""
        order, free = self.free()
        rank = (jnp.cumsum(wanted.ravel()) - 1).reshape(wanted.shape)
        page = jnp.where(rank < free, order[jnp.clip(rank, 0, self.pages - 1)], -1)
        return self.replace(table=jnp.where(wanted, page, self.table))

    def attend(self, layer, q, k, v, window, *, scale, sliding=None, softcap=None):
        out = window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.length,
                               table=self.table, scale=scale, sliding=sliding, softcap=softcap,
                               key_positions=window.key_positions, cached=window.cached)
        return out, own_entry(q, k, v)

    def commit(self, entries, slots):
        place = slots // self.page                                            # of the table; -1 stays -1
        touched = (place[:, :, None] == jnp.arange(self.table.shape[1])).any(1)
        new = self.claim(touched & (self.table < 0))
        page = jnp.take_along_axis(new.table, jnp.maximum(place, 0), 1)
        page = jnp.where((slots >= 0) & (page >= 0), page, self.pages)        # beyond the pool: dropped
        put = lambda pool, x: pool.at[page, :, slots % self.page].set(x.astype(pool.dtype), mode="drop")
        kv = tuple(put(pool, entry.both) for pool, entry in zip(self.kv, entries, strict=True))
        return new.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def tree_buffer(self, entries, room):
        return TreeBuffer.empty(self, entries, room)

    def select(self, rows):
        new = self.replace(table=self.table[rows], length=self.length[rows],
                           given=jax.tree.map(lambda x: x[rows], self.given))
        begun = new.length % self.page > 0
        again = jnp.tril(rows[:, None] == rows, -1).any(1)                    # an earlier row comes from the same one
        place = jnp.arange(self.table.shape[1]) == (new.length // self.page)[:, None]
        wanted = place & (again & begun)[:, None] & (new.table >= 0)
        copies = new.claim(wanted)
        to = jnp.where(wanted & (copies.table >= 0), copies.table, self.pages).ravel()
        copy = lambda pool: pool.at[to].set(pool[jnp.maximum(new.table, 0).ravel()], mode="drop")
        return copies.replace(kv=tuple(map(copy, self.kv)))

    def room(self, running):
        _, free = self.free()
        rows = jnp.maximum(running.sum(), 1)
        own = (self.table >= 0).sum(1)
        more = (free + rows - jnp.cumsum(running)) // rows                    # all free pages, as evenly as they go
        lost = own * self.page < self.length                                  # a page was wanted and there was none
        return jnp.where(lost, 0, (own + more) * self.page - self.length).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Paged:
    pages: int
    page: int

    def __call__(self, layers, batch, capacity, dtype, inputs=None):
        return PagedCache(kv=empty_kv(layers, self.pages, self.page, dtype), length=jnp.zeros(batch, jnp.int32),
                          table=jnp.full((batch, -(-capacity // self.page)), -1, jnp.int32), given=inputs)


paged = Paged(pages=32, page=4)
options = dict(max_new_tokens=20, temperature=0.8, num_samples=2, seed=3)
assert (dx.generate(lm, prompts, cache=paged, **options).tokens == dx.generate(lm, prompts, **options).tokens).all()

few = dx.generate(lm, prompts, cache=Paged(pages=10, page=4), max_new_tokens=20)
print([(status.name, int(n)) for status, n in zip(few.status, few.lengths, strict=False)])


@struct
class Counting(Wrapper):
    """Counts the entries that each row commits: `i32[B]`."""

    base: object
    committed: Array

    def commit(self, entries, slots):
        return super().commit(entries, slots).replace(committed=self.committed + (slots >= 0).sum(1))


@dataclasses.dataclass(frozen=True)
class Counted:
    kind: object

    def __call__(self, layers, batch, capacity, dtype, inputs=None):
        base = self.kind(layers, batch, capacity, dtype, inputs)
        return Counting(base=base, committed=jnp.zeros(batch, jnp.int32))


out = dx.generate(lm, prompts, cache=Counted(h2o), max_new_tokens=20, algorithm=lookup)
assert (out.tokens == plain.tokens).all()
