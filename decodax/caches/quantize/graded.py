"""More bits for the tokens that matter ("ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token
Identification", He et al., 2024).

A token is salient by the attention that it receives, on the average of the queries that could see it; a few probes
tell, the latest queries of a prompt and as many at random. Salient tokens take more bits than the others. Keys have a
step for each channel, and values, divided by a scale of their channel, one for each token of a head.

Tokens behind the prompt stay whole until there are `gap` of them; then the newest one's query says which are salient,
and all are written. A round commits no token beyond that point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache import Dense, KVLayer, Scratch, Wrapper, dense
from decodax.cache.dense import write
from decodax.caches.quantize.codecs import pack, unpack
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Draftable, Entries, PyTree, ReadPrompt, Sized
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, window_attention_lse

BLOCK = 512
"""Tokens that are decoded at a time."""


@struct
class Grade(Struct):
    """Tokens of as many bits, of one row or of several; `E` times tokens were written together.

    Attributes:
        keys, values: `u8[..., G, S, d * bits / 8]`. key_steps, key_lows: `f[..., G, E, d]`.
        value_steps, value_lows: `f[..., G, S]`. scales: `f[..., G, E, e]` of the values' channels.
    """

    keys: Array
    values: Array
    key_steps: Array
    key_lows: Array
    value_steps: Array
    value_lows: Array
    scales: Array


def salience(queries: Array, asked_at: Array, counts: Array, keys: Array, length: Array) -> Array:
    """`f32[G, S]`: what the tokens of a prompt receive from some queries, on the average of all that could see them.

    Args:
        queries: `f[P, H, d]`, scaled as attention takes them, at `asked_at` (`i32[P]`). counts: `bool[P]`, which count.
        keys: `f[G, S, d]`, of which the first `length` (`i32[]`) count.
    """
    (P, H, d), (G, S, _) = queries.shape, keys.shape
    f32 = lambda x: x.astype(jnp.float32)
    scores = jnp.einsum("pgrd,gsd->grps", f32(queries).reshape(P, G, H // G, d), f32(keys))
    seen = (jnp.arange(S) <= asked_at[:, None]) & counts[:, None]
    return jax.nn.softmax(scores, axis=-1, where=seen).sum((1, 2)) / jnp.maximum(length - jnp.arange(S), 1)


def channel_scales(values: Array, valid: Array) -> Array:
    """`f[G, e]`: the roots of the largest magnitudes of the channels of `f[G, n, e]`, of tokens that are `valid`."""
    scale = jnp.sqrt(jnp.where(valid[:, None], jnp.abs(values), 0).max(1))
    return jnp.where(scale > 0, scale, 1)


def graded(kv: Array, valid: Array, scales: Array, d: int, bits: int) -> Grade:
    """Tokens `f[G, n, d + e]` that are written together, of which those that are `valid` (`bool[n]`) count."""
    keys, values = kv[..., :d], kv[..., d:] / scales[:, None]
    some, dtype = valid[:, None], kv.dtype

    def codes(x: Array, low: Array, high: Array) -> tuple[Array, Array]:
        step = (high - low) / (2**bits - 1)
        number = jnp.clip(jnp.round((x - low) / jnp.where(step > 0, step, 1)), 0, 2**bits - 1)
        return pack(number.astype(jnp.uint8), bits), step.astype(dtype)

    low = jnp.where(some, keys, jnp.inf).min(1, keepdims=True, initial=jnp.inf)
    high = jnp.where(some, keys, -jnp.inf).max(1, keepdims=True, initial=-jnp.inf)
    low, high = (jnp.where(jnp.isfinite(x), x, 0) for x in (low, high))
    key_codes, key_steps = codes(keys, low, high)
    value_low = values.min(-1, keepdims=True)
    value_codes, value_steps = codes(values, value_low, values.max(-1, keepdims=True))
    return Grade(keys=key_codes, values=value_codes, key_steps=key_steps, key_lows=low.astype(dtype),
                 value_steps=value_steps[..., 0], value_lows=value_low[..., 0].astype(dtype), scales=scales[:, None])


def restored(own: Grade, event: Array, bits: int, dtype: Any) -> Array:
    """`f[G, n, d + e]`: what the tokens stand for, of which number `i` was written at time `event[i]` (`i32[n]`)."""
    keys = unpack(own.keys, bits).astype(dtype) * own.key_steps[:, event] + own.key_lows[:, event]
    values = unpack(own.values, bits).astype(dtype) * own.value_steps[..., None] + own.value_lows[..., None]
    return jnp.concatenate([keys, values * own.scales[:, event]], -1)


@struct
class Graded(Sized):
    """Salient tokens, others, and the latest ones whole.

    Attributes:
        grades: of each layer a pair, of salient tokens and of the others. rest: of each `f[B, G, R, d + e]`.
        first: `i32[B, 2]`, how many of the prompt's tokens each has. times: `i32[B]`, how often tokens were written
            behind it. length: `i32[B]`. given: see `Cache.inputs`.
    """

    grades: tuple[tuple[Grade, Grade], ...]
    rest: tuple[Array, ...]
    first: Array
    times: Array
    length: Array
    given: PyTree
    shapes: tuple[KVLayer, ...] = static()
    size: int = static()
    kind: Grading = static()

    supports = frozenset({"trees"})

    @property
    def coded(self) -> Array:
        """`i32[B]`: tokens that are not whole."""
        return self.first.sum(1) + self.times * self.kind.gap

    def max_commit(self) -> Array | None:
        return self.kind.gap - (self.length - self.coded) if self.rest else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill or bias is not None or softcap is not None:
            raise ValueError("cache: zipcache reads a prompt as a whole, which only the model that answers does, and "
                             "takes no bias and no soft cap of the scores; give a draft model another cache")
        start, at = self.coded[:, None], window.positions
        so_far = window_attention_lse(q, k, v, window.visible(), at - start, self.rest[layer], self.length - self.coded,
                                      key_positions=window.key_positions - start, scale=scale)
        for which, own in enumerate(self.grades[layer]):
            so_far = self._walk(own, which, q, at, scale, so_far)
        out, sums = so_far
        new = k.shape[1] - q.shape[1]
        return out, (k[:, new:], v[:, new:], q * scale, sums)

    def _walk(self, own: Grade, which: int, q: Array, at: Array, scale: float,
              so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        """With attention to the tokens of a grade, block by block."""
        bits, each = self.kind.bits[which], self.kind.each(self.kind.gap)[which]
        slots, first = own.keys.shape[2], self.first[:, which]
        held, block = first + self.times * each, min(BLOCK, own.keys.shape[2])

        def part(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            some = lambda x: lax.dynamic_slice_in_dim(x, i * block, block, 1) if x.shape[1] == slots else x

            def one(own: Grade, first: Array) -> Array:
                place = i * block + jnp.arange(block, dtype=jnp.int32)
                event = jnp.where(place < first, 0, 1 + (place - first) // max(each, 1))
                here = own.replace(**{name: some(getattr(own, name)) for name in (
                    "keys", "values", "value_steps", "value_lows")})
                return restored(here, jnp.minimum(event, own.scales.shape[1] - 1), bits, q.dtype)

            both = jax.vmap(one)(own, first)
            both = jnp.pad(both, ((0, 0), (0, 0), (0, -block % WALK if block > WALK else 0), (0, 0)))
            return merge(so_far, prefix_attention(q, at, both, jnp.clip(held - i * block, 0, block), scale=scale))

        return lax.fori_loop(0, (held.max() + block - 1) // block, part, so_far)

    def commit(self, entries: Entries, slots: Array) -> Graded:
        if not self.rest:
            return self
        to = jnp.where(slots >= 0, slots - self.coded[:, None], -1)
        rest = tuple(write(held, jnp.concatenate(entry[:2], -1), to)
                     for held, entry in zip(self.rest, entries, strict=True))
        new = self.replace(rest=rest, length=jnp.maximum(self.length, slots.max(1) + 1))
        full = (new.length > self.length) & (new.length - new.coded == self.kind.gap)
        newest = jnp.argmax(slots, 1)
        asked = tuple(tuple(jnp.take_along_axis(x, newest.reshape(-1, *[1] * (x.ndim - 1)), 1)[:, 0] for x in entry[2:])
                      for entry in entries)
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._written(full, asked))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _written(self, rows: Array, asked: Any) -> Graded:
        """With the whole tokens of those rows (`bool[B]`) in grades; `asked`: of each layer the newest token's queries
        and the logarithms of their sums."""
        kind, gap, made = self.kind, self.kind.gap, []
        each = kind.each(gap)
        for shape, grades, rest, (q, sums) in zip(self.shapes, self.grades, self.rest, asked, strict=True):

            def one(row: Any, shape: KVLayer = shape) -> tuple[Grade, Grade]:
                grades, kv, q, sums, first, times, choose = row
                d = shape.width
                scores = jnp.einsum("grd,gsd->grs", q.reshape(shape.heads, -1, d), kv[..., :d]).astype(jnp.float32)
                paid = jnp.exp(scores - sums.reshape(*scores.shape[:2], 1)).sum(1)
                split = kind.split(kv, paid, jnp.ones(gap, bool), each[1], each, d)
                put = [_put(old, new, first[i] + times * each[i], 1 + times, choose)
                       for i, (old, new) in enumerate(zip(grades, split, strict=True))]
                return put[0], put[1]

            made.append(jax.vmap(one)((grades, rest[:, :, :gap], q, sums, self.first, self.times, rows)))
        return self.replace(grades=tuple(made), times=self.times + rows)

    def prefill_cache(self) -> Cache:
        if not self.rest:
            return self
        B, dtype = self.length.shape[0], self.rest[0].dtype
        return PromptToGrade(base=dense(self.shapes, B, self.size, dtype, self.given), kind=self.kind,
                             queries=tuple(jnp.zeros((B, s.queries or s.heads, self.size, s.width), dtype)
                                           for s in self.shapes), shapes=self.shapes)

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)


def _put(into: Grade, new: Grade, start: Array, event: Array, choose: Array) -> Grade:
    """With new tokens from a place on, of a row that chooses."""

    def put(name: str, at: Array) -> Array:
        x, y = getattr(into, name), getattr(new, name)
        old = lax.dynamic_slice_in_dim(x, at, y.shape[1], 1)
        return lax.dynamic_update_slice_in_dim(x, jnp.where(choose, y.astype(x.dtype), old), at, 1)

    places = dict.fromkeys(("keys", "values", "value_steps", "value_lows"), start)
    return into.replace(**{name: put(name, at) for name, at in
                           (places | dict.fromkeys(("key_steps", "key_lows", "scales"), event)).items()})


@struct
class PromptToGrade(Wrapper):
    """A prompt that will be graded; `queries`: `f[B, H, S, d]` of each layer, scaled."""

    base: Dense
    queries: tuple[Array, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: Grading = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        return out, (*entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> PromptToGrade:
        queries = tuple(write(held, entry[2], slots) for held, entry in zip(self.queries, entries, strict=True))
        return self.replace(base=self.base.commit([entry[:2] for entry in entries], slots), queries=queries)

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kind, base, size, made = self.kind, self.base, self.base.capacity, []
        late, random, others = (jnp.asarray(table) for table in kind.tables(size))
        into = kind.empty(self.shapes, base.length.shape[0], size, base.kv[0].dtype, base.given)
        P = size - int(kind.tables(size)[0][size]) + 1

        def one(row: Any, shape: KVLayer, old: tuple[Grade, Grade]) -> tuple[Grade, Grade]:
            kv, queries, n = row
            after = late[n] + jnp.arange(P, dtype=jnp.int32)
            before = (jax.random.uniform(jax.random.key(0), (P,)) * late[n]).astype(jnp.int32)
            at = jnp.concatenate([after, before])
            counts = jnp.concatenate([after < n, jnp.arange(P) < random[n]])
            valid = jnp.arange(size) < n
            paid = salience(queries[:, jnp.minimum(at, size - 1)].swapaxes(0, 1), at, counts, kv[..., :shape.width], n)
            room = old[0].keys.shape[1], old[1].keys.shape[1]
            split = kind.split(kv, paid, valid, others[n], room, shape.width)
            put = [_put(grade, new, jnp.int32(0), jnp.int32(0), jnp.bool_(True))
                   for grade, new in zip(old, split, strict=True)]
            return put[0], put[1]

        for shape, kv, queries, grades in zip(self.shapes, base.kv, self.queries, into.grades, strict=True):
            empty = jax.tree.map(lambda x: x[0], grades)
            made.append(lax.map(lambda row, shape=shape, empty=empty: one(row, shape, empty),
                                (kv, queries, base.length)))
        low = others[base.length]
        return into.replace(grades=tuple(made), length=base.length, first=jnp.stack([base.length - low, low], 1))


@dataclasses.dataclass(frozen=True)
class Grading(CacheConfig):
    """A `Graded` cache.

    Attributes:
        bits: of salient tokens, and of the others: 2, 4 or 8. ordinary: the share of the others.
        probes: the share of a prompt's queries that tell, latest ones and others half each.
        gap: tokens behind the prompt that are written together.
    """

    bits: tuple[int, int] = (4, 2)
    ordinary: float = 0.4
    probes: float = 0.1
    gap: int = 100

    def __post_init__(self) -> None:
        if any(b not in (2, 4, 8) for b in self.bits):
            raise ValueError(f"bits: got {self.bits}, takes 2, 4 or 8 for salient tokens, and for the others")
        if not 0 <= self.ordinary <= 1 or not 0 < self.probes <= 1 or self.gap < 1:
            raise ValueError(f"ordinary, probes, gap: got {self.ordinary}, {self.probes} and {self.gap}, takes 0 to 1, "
                             "more than 0 up to 1, and 1 or more")

    def each(self, count: int) -> tuple[int, int]:
        """How many of so many tokens are salient, and how many are not."""
        return count - int(self.ordinary * count), int(self.ordinary * count)

    def tables(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For prompts of each length up to `size`: where the latest probes begin, how many others there are, and how
        many tokens are not salient."""
        n, half = range(size + 1), self.probes / 2
        return tuple(np.array(x, np.int32) for x in (       # type: ignore[return-value]
            [min(int(i - half * i), max(i - 1, 0)) for i in n], [int(half * i) for i in n],
            [self.each(i)[1] for i in n]))

    def split(self, kv: Array, paid: Array, valid: Array, low: Array | int, room: tuple[int, int],
              d: int) -> tuple[Grade, Grade]:
        """The grades, of `room` tokens each, of `f[G, n, d + e]` of which the `low` with the smallest `paid` (`f[G,
        n]`) are not salient. Heads differ in which tokens these are, not in how many."""
        order = jnp.argsort(jnp.where(valid, paid, jnp.inf), -1)
        rank = jnp.argsort(order, -1)
        scales = channel_scales(kv[..., d:], valid)
        made = []
        for own, slots, bits in ((rank >= low, room[0], self.bits[0]), (rank < low, room[1], self.bits[1])):
            own = own & valid
            number = own.sum(-1)[0]
            at = jnp.argsort(~own, -1, stable=True)[:, :slots]
            at = jnp.pad(at, ((0, 0), (0, slots - at.shape[1])))
            made.append(graded(jnp.take_along_axis(kv, at[..., None], 1), jnp.arange(slots) < number, scales, d, bits))
        return made[0], made[1]

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Graded:
        """An empty cache."""
        times = size // self.gap + 1
        salient, low = self.each(size)
        # a number of tokens is rounded each time that some are written
        slots = [-(-n // 8) * 8 if n <= BLOCK else -(-n // BLOCK) * BLOCK
                 for n in (max(salient + times + 1, self.gap), max(low + 1, self.gap))]
        zeros = lambda *dims, of=dtype: jnp.zeros((batch, *dims), of)
        grades = []
        for s in shapes:
            G, d, e = s.heads, s.width, s.both - s.width
            if s.sliding is not None:
                raise ValueError("cache: zipcache takes a model without sliding windows")
            if any(width * bits % 8 for width in (d, e) for bits in self.bits):
                raise ValueError(f"width: got heads of {d} and {e}, takes a multiple of {8 // min(self.bits)}")
            grades.append(tuple(Grade(
                keys=zeros(G, n, d * bits // 8, of=jnp.uint8), values=zeros(G, n, e * bits // 8, of=jnp.uint8),
                key_steps=zeros(G, times, d), key_lows=zeros(G, times, d), value_steps=zeros(G, n),
                value_lows=zeros(G, n), scales=zeros(G, times, e)) for n, bits in zip(slots, self.bits, strict=True)))
        latest = self.gap if self.gap <= WALK else -(-self.gap // WALK) * WALK
        rest = tuple(zeros(s.heads, latest, s.both) for s in shapes)
        return Graded(grades=tuple(grades), rest=rest,  # type: ignore[arg-type]
                      first=zeros(2, of=jnp.int32), times=zeros(of=jnp.int32), length=zeros(of=jnp.int32), given=inputs,
                      shapes=shapes, size=size, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
