"""ZipCache: more bits for salient tokens ("ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token
Identification", He et al., 2024).

The salience of a token is the attention that it receives, averaged over the queries that can attend to it. It is
estimated with probes: the latest queries of a prompt, and the same number of random ones. Salient tokens are quantized
with more bits than the others. Keys have a quantization step for each channel. Values are divided by a scale for each
channel, and have a step for each token of a head.

Tokens after the prompt are not quantized until there are `stream_gap` of them. Then the attention of the newest one
measures their salience, and all are quantized. A round commits no token beyond that point.

Salience and steps are those of the authors' code (b6932b9). A step is shared by the values of a token in a head, not
by all heads; written tokens do not change; random probes are the same for all prompts of a length.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache import KVLayer
from decodax.cache.dense import dense_like, write
from decodax.cache.entry import MeasuredEntry, own_entry
from decodax.cache.key_values import KVConfig, Score, refuse_prefill
from decodax.cache.tail import Tail
from decodax.caches.asking import AskingDense
from decodax.caches.quantize.codecs import pack, unpack
from decodax.caches.quantize.quantized import BLOCK
from decodax.common.options import Count, Range, Share, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, WholePrompt
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, whole_blocks


@struct
class Grade(Struct):
    """Tokens that are quantized with the same number of bits, each in one of up to `E` groups (the tokens that were
    quantized at the same time). The arrays are those of one row, or of several rows with leading axes.

    Attributes:
        keys, values: `u8[..., G, S, d * bits / 8]`, packed codes; `e` in place of `d` for values.
        key_steps, key_lows: `f[..., G, E, d]`, steps and zero points of keys, for each group and channel.
        value_steps, value_lows: `f[..., G, S]`, those of values, for each token.
        scales: `f[..., G, E, e]`, factors of the channels of decoded values, for each group.
    """

    keys: Array
    values: Array
    key_steps: Array
    key_lows: Array
    value_steps: Array
    value_lows: Array
    scales: Array


def salience(queries: Array, asked_at: Array, counts: Array, keys: Array, length: Array) -> Array:
    """Returns the attention of probes to tokens of a prompt, averaged over all queries that can attend to them, `f32[G,
    S]`.

    Args:
        queries: `f[P, H, d]`, scaled probes.
        asked_at: `i32[P]`, positions of the probes.
        counts: `bool[P]`, True for probes that exist.
        keys: `f[G, S, d]`.
        length: `i32[]`, number of tokens.
    """
    (P, H, d), (G, S, _) = queries.shape, keys.shape
    f32 = lambda x: x.astype(jnp.float32)
    scores = jnp.einsum("pgrd,gsd->grps", f32(queries).reshape(P, G, H // G, d), f32(keys))
    seen = (jnp.arange(S) <= asked_at[:, None]) & counts[:, None]
    return jax.nn.softmax(scores, axis=-1, where=seen).sum((1, 2)) / jnp.maximum(length - jnp.arange(S), 1)


def channel_scales(values: Array, valid: Array) -> Array:
    """Returns the square root of each channel's largest magnitude among valid tokens, `f[G, e]`.

    Args:
        values: `f[G, n, e]`.
        valid: `bool[n]`, tokens that exist.
    """
    scale = jnp.sqrt(jnp.where(valid[:, None], jnp.abs(values), 0).max(1))
    return jnp.where(scale > 0, scale, 1)


def graded(kv: Array, valid: Array, scales: Array, d: int, bits: int) -> Grade:
    """Quantizes tokens as one group.

    Args:
        kv: `f[G, n, d + e]`, keys and values.
        valid: `bool[n]`, tokens that exist.
        scales: `f[G, e]`, scales of the channels of values.
        d: width of keys.
        bits: number of bits of a number.
    """
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
    """Decodes the tokens of one row: returns keys and values, `f[G, n, d + e]`.

    Args:
        own: the quantized tokens.
        event: `i32[n]`, the index of each token's group in `Grade.key_steps` and `Grade.scales`.
        bits: number of bits of a code.
        dtype: dtype of the result.
    """
    keys = unpack(own.keys, bits).astype(dtype) * own.key_steps[:, event] + own.key_lows[:, event]
    values = unpack(own.values, bits).astype(dtype) * own.value_steps[..., None] + own.value_lows[..., None]
    return jnp.concatenate([keys, values * own.scales[:, event]], -1)


@struct
class ZipCacheCache(Tail, WholePrompt):
    """Salient tokens and other tokens, quantized, and the latest ones, unquantized.

    Attributes:
        grades: for each layer a pair, salient tokens and the others.
        first: `i32[B, 2]`, number of prompt tokens in each grade.
        times: `i32[B]`, number of groups quantized after the prompt.
        kv, length, given, size, shapes, kind: see `Tail`.
    """

    grades: tuple[tuple[Grade, Grade], ...]
    first: Array
    times: Array

    if TYPE_CHECKING:
        kind: ZipCacheConfig

    @property
    def start(self) -> Array:
        """`i32[B]`: number of quantized tokens of each row, which is also the position of the first token that is
        not."""
        return self.first.sum(1) + self.times * self.kind.stream_gap

    def room(self, running: Array) -> Array | None:
        return None     # the latest tokens make room by being quantized

    def max_commit(self) -> Array | None:
        return self.kind.stream_gap - (self.length - self.start) if self.kv else None

    def check_windows(self) -> None:
        refuse_prefill("zipcache")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        so_far = self.attend_tail(layer, q, k, v, window, scale=scale, sinks=sinks)
        for which, own in enumerate(self.grades[layer]):
            so_far = self._walk(own, which, q, window.positions, scale, so_far)
        out, sums = so_far
        entry = own_entry(q, k, v)
        return out, MeasuredEntry(entry.keys, entry.values, q * scale, sums)

    def _walk(self, own: Grade, which: int, q: Array, at: Array, scale: float,
              so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        """Merges attention to the tokens of a grade into `so_far`, block by block."""
        bits, each = self.kind.bits[which], self.kind.each(self.kind.stream_gap)[which]
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

    def commit(self, entries: Entries, slots: Array) -> ZipCacheCache:
        if not self.kv:
            return self
        new = super().commit(entries, slots)
        full = (new.length > self.length) & (new.length - new.start == self.kind.stream_gap)
        newest = jnp.argmax(slots, 1)
        of_newest = lambda x: jnp.take_along_axis(x, newest.reshape(-1, *[1] * (x.ndim - 1)), 1)[:, 0]
        asked = tuple((of_newest(entry.queries), of_newest(entry.sums)) for entry in entries)
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._written(full, asked))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _written(self, rows: Array, asked: Any) -> ZipCacheCache:
        """Quantizes the latest tokens of some rows (`bool[B]`). `asked` has, for each layer, the newest token's queries
        and the logarithms of their softmax sums."""
        kind, gap, made = self.kind, self.kind.stream_gap, []
        each = kind.each(gap)
        for shape, grades, kv, (q, sums) in zip(self.shapes, self.grades, self.kv, asked, strict=True):

            def one(row: Any, shape: KVLayer = shape) -> tuple[Grade, Grade]:
                grades, kv, q, sums, first, times, choose = row
                d = shape.width
                scores = jnp.einsum("grd,gsd->grs", q.reshape(shape.heads, -1, d), kv[..., :d]).astype(jnp.float32)
                paid = jnp.exp(scores - sums.reshape(*scores.shape[:2], 1)).sum(1)
                split = kind.split(kv, paid, jnp.ones(gap, bool), each[1], each, d)
                put = [_put(old, new, first[i] + times * each[i], 1 + times, choose)
                       for i, (old, new) in enumerate(zip(grades, split, strict=True))]
                return put[0], put[1]

            made.append(jax.vmap(one)((grades, kv[:, :, :gap], q, sums, self.first, self.times, rows)))
        return self.replace(grades=tuple(made), times=self.times + rows)

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        B, dtype = self.length.shape[0], self.kv[0].dtype
        return PromptToQuantizeBySalience(base=dense_like(self), kind=self.kind,
                             queries=tuple(jnp.zeros((B, s.queries or s.heads, self.size, s.width), dtype)
                                           for s in self.shapes), shapes=self.shapes)


def _put(into: Grade, new: Grade, start: Array, event: Array, choose: Array) -> Grade:
    """Writes a group of tokens to a grade, in the rows where `choose` is True. `start` is the first slot, `event` the
    number of the group."""

    def put(name: str, at: Array) -> Array:
        x, y = getattr(into, name), getattr(new, name)
        old = lax.dynamic_slice_in_dim(x, at, y.shape[1], 1)
        return lax.dynamic_update_slice_in_dim(x, jnp.where(choose, y.astype(x.dtype), old), at, 1)

    places = dict.fromkeys(("keys", "values", "value_steps", "value_lows"), start)
    return into.replace(**{name: put(name, at) for name, at in
                           (places | dict.fromkeys(("key_steps", "key_lows", "scales"), event)).items()})


@struct
class PromptToQuantizeBySalience(AskingDense):
    """ZipCache's cache during prefill, with all tokens of the prompt in `base`. `finish_prefill` quantizes them by
    their salience.

    Attributes:
        queries: for each layer `f[B, H, S, d]`, scaled queries.
    """

    queries: tuple[Array, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: ZipCacheConfig = static()

    def commit(self, entries: Entries, slots: Array) -> PromptToQuantizeBySalience:
        queries = tuple(write(held, entry.queries, slots) for held, entry in zip(self.queries, entries, strict=True))
        return super().commit(entries, slots).replace(queries=queries)

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


@CACHES.register("zipcache", "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
                 "He et al. 2024", family="quantize")
@dataclasses.dataclass(frozen=True)
class ZipCacheConfig(KVConfig):
    """Keeps salient tokens in 4 bits and the other tokens in 2; the latest tokens are not quantized.

    Salience is measured on the prompt, so nothing has to be fitted. It needs a model without sliding windows, soft caps
    and biases of its scores.

    Attributes:
        bits: number of bits of salient tokens, and of the others: 2, 4 or 8.
        unimportant_ratio: share of tokens that are not salient.
        probe_ratio: share of a prompt's queries that are probes; half of these are the latest ones.
        stream_gap: number of tokens after the prompt that are quantized together; the latest tokens are unquantized
            until there are that many.
    """

    bits: tuple[int, int] = (4, 2)
    unimportant_ratio: Share = 0.4
    probe_ratio: Annotated[float, Range(0, 1, above=True)] = 0.1
    stream_gap: Count = 100

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        if any(b not in (2, 4, 8) for b in self.bits):
            raise ValueError(f"bits: got {self.bits}, takes 2, 4 or 8 for salient tokens, and for the others")

    def each(self, count: int) -> tuple[int, int]:
        """Returns the number of salient tokens and the number of the others, if `count` tokens are quantized
        together."""
        return count - int(self.unimportant_ratio * count), int(self.unimportant_ratio * count)

    def tables(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns three arrays `i32[size + 1]` whose entry `n` is for a prompt of `n` tokens: the position of the first
        of the latest probes, the number of random probes, and the number of tokens that are not salient."""
        n, half = range(size + 1), self.probe_ratio / 2
        return tuple(np.array(x, np.int32) for x in (       # type: ignore[return-value]
            [min(int(i - half * i), max(i - 1, 0)) for i in n], [int(half * i) for i in n],
            [self.each(i)[1] for i in n]))

    def split(self, kv: Array, paid: Array, valid: Array, low: Array | int, room: tuple[int, int],
              d: int) -> tuple[Grade, Grade]:
        """Returns the grades of tokens. Heads choose different tokens, but the same number.

        Args:
            kv: `f[G, n, d + e]`, keys and values.
            paid: `f[G, n]`, salience.
            valid: `bool[n]`, tokens that exist.
            low: number of tokens with the smallest salience that are not salient.
            room: numbers of slots of the two grades.
            d: width of keys.
        """
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

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("sliding windows", "soft caps", "biases"))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> ZipCacheCache:
        times = size // self.stream_gap + 1
        salient, low = self.each(size)
        # the share of salient tokens is rounded in each group
        slots = [whole_blocks(-(-n // 8) * 8, BLOCK)
                 for n in (max(salient + times + 1, self.stream_gap), max(low + 1, self.stream_gap))]
        zeros = lambda *dims, of=dtype: jnp.zeros((batch, *dims), of)
        grades = []
        for s in shapes:
            G, d, e = s.heads, s.width, s.both - s.width
            if any(width * bits % 8 for width in (d, e) for bits in self.bits):
                raise ValueError(f"width: got heads of {d} and {e}, takes a multiple of {8 // min(self.bits)}")
            grades.append(tuple(Grade(
                keys=zeros(G, n, d * bits // 8, of=jnp.uint8), values=zeros(G, n, e * bits // 8, of=jnp.uint8),
                key_steps=zeros(G, times, d), key_lows=zeros(G, times, d), value_steps=zeros(G, n),
                value_lows=zeros(G, n), scales=zeros(G, times, e)) for n, bits in zip(slots, self.bits, strict=True)))
        kv = tuple(zeros(s.heads, whole_blocks(self.stream_gap), s.both) for s in shapes)
        return ZipCacheCache(grades=tuple(grades), kv=kv,  # type: ignore[arg-type]
                      first=zeros(2, of=jnp.int32), times=zeros(of=jnp.int32), length=zeros(of=jnp.int32), given=inputs,
                      shapes=shapes, size=size, kind=self)
