"""QAQ: as many bits for each token as keep its error below a bound ("QAQ: Quality Adaptive Quantization for LLM KV
Cache", Dong et al., 2024).

What an error in a key does to attention grows otherwise than what one in a value does. So each token of a prompt takes
as few bits as its bound allows: of keys the bound is one for all, of values it is the tighter, the more the latest
queries attend to the token. The largest and smallest numbers of a token are kept apart as they are.

Codes of different widths lie one behind the other in a pool of bytes, whose size is fixed: `most` bits a number on the
average. Where a text asks for more, the widest codes get fewer bits, until it fits. Tokens behind the prompt stay
whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Dense, KVLayer, Scratch, Wrapper, dense
from decodax.cache.dense import write
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Draftable, Entries, PyTree, ReadPrompt, Sized
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, window_attention_lse

BLOCK = 512
"""Tokens that are decoded at a time."""


@struct
class Pool(Struct):
    """The keys or the values of a prompt in one layer, of one row or of several; a token's `N` numbers are one unit.

    Attributes:
        codes: `u8[..., P]`, one unit behind the other. starts: `i32[..., S]`, each one's first byte.
        bits: `u8[..., S]`, of each of its numbers. means, steps: `f32[..., S]`.
        at: `u16[..., S, o]`, which of a token's numbers are kept as they are. outliers: `f[..., S, o]`.
    """

    codes: Array
    starts: Array
    bits: Array
    means: Array
    steps: Array
    at: Array
    outliers: Array


def needed(spread: Array, error: Array | float, least: int, most: int) -> Array:
    """`i32[S]`: bits with which numbers in a range of `spread` (`f32[S]`) are off by no more than `error`."""
    bits = jnp.ceil(jnp.log2(spread / (2 * error) + 1))
    return jnp.clip(jnp.where(jnp.isfinite(bits), bits, least), least, most).astype(jnp.int32)


def key_error(length: Array, target: float, norm: float) -> Array:
    """`f32[]`: how far keys may be off in a text of `length` tokens, for queries of a `norm`."""
    n = length.astype(jnp.float32)
    return jnp.sqrt(12 / norm * jnp.log(n**3 / jnp.maximum(n - 1, 1) * target**2 + 1))


def value_error(length: Array, target: float, paid: Array) -> Array:
    """`f32[S]`: how far values may be off that receive at most `paid` (`f32[S]`) of a query's attention."""
    return jnp.sqrt(12 / jnp.maximum(length, 1).astype(jnp.float32)) * target / paid


def encoded(x: Array, error: Array | float, valid: Array, late: Array, kind: Bounded, size: int) -> Pool:
    """The pool, of `size` bytes, of a row's numbers `f[S, N]`.

    Args:
        error: how far each may be off, `f32[S]` or one for all. valid, late: `bool[S]`, which tokens there are, and
            which take the most bits in any case.
    """
    (S, N), store, x = x.shape, x.dtype, x.astype(jnp.float32)
    low, high = kind.apart(N)
    order = jnp.argsort(x, axis=-1, stable=True)
    inner = jnp.take_along_axis(x, order[:, low:high], 1)
    at = jnp.concatenate([order[:, :low], order[:, high:]], 1)
    spread, means = inner[:, -1] - inner[:, 0], inner.mean(-1)
    bits = jnp.where(late, kind.bits[1], needed(spread, error, *kind.bits))
    # the largest bound of the bits with which all of them fit; with the fewest they do
    bounds = jnp.arange(kind.bits[0], kind.bits[1] + 1)
    total = jnp.where(valid, jnp.minimum(bits, bounds[:, None]), 0).sum(1) * (N // 8)
    bits = jnp.where(valid, jnp.minimum(bits, bounds[jnp.maximum((total <= size).sum() - 1, 0)]), 0)
    steps = jnp.where(spread > 0, spread, 1) / 2.0**bits
    half = 2.0 ** (bits - 1)
    number = jnp.clip(jnp.round((x - means[:, None]) / steps[:, None]), -half[:, None], half[:, None] - 1)
    numbers = (number + half[:, None]).astype(jnp.int32)
    ends = jnp.cumsum(bits * (N // 8))
    starts = ends - bits * (N // 8)

    place = jnp.arange(size, dtype=jnp.int32)
    unit = jnp.minimum(jnp.searchsorted(ends, place, side="right"), S - 1)
    bit = (place - starts[unit])[:, None] * 8 + jnp.arange(8)
    wide = jnp.maximum(bits[unit], 1)[:, None]
    found = numbers[unit[:, None], jnp.clip(bit // wide, 0, N - 1)] >> (bit % wide) & 1
    codes = jnp.where(place < ends[-1], (found << jnp.arange(8)).sum(-1), 0).astype(jnp.uint8)
    return Pool(codes=codes, starts=starts, bits=bits.astype(jnp.uint8), means=means, steps=steps,
                at=at.astype(jnp.uint16), outliers=jnp.take_along_axis(x, at, 1).astype(store))


def decoded(pool: Pool, numbers: int, dtype: Any) -> Array:
    """`f[S, N]`: what units stand for, of which `pool` may have a part but for its codes."""
    bits = pool.bits.astype(jnp.int32)[:, None]
    bit = bits * jnp.arange(numbers)
    byte = pool.starts[:, None] + (bit >> 3)
    read = lambda at: pool.codes[jnp.minimum(at, pool.codes.shape[0] - 1)].astype(jnp.int32)
    found = (read(byte) | read(byte + 1) << 8) >> (bit & 7) & ((1 << bits) - 1)
    x = (found - 2.0 ** (bits - 1)) * pool.steps[:, None] + pool.means[:, None]
    put = jax.vmap(lambda row, at, own: row.at[at.astype(jnp.int32)].set(own))
    return put(x.astype(dtype), pool.at, pool.outliers.astype(dtype))


@struct
class BoundedCodes(Sized):
    """A prompt in pools, and what follows it.

    Attributes:
        pools: of each layer that of keys and that of values. rest: of each `f[B, G, R, d + e]`, the tokens behind.
        began: `i32[B]` tokens of the prompt. length: `i32[B]`. given: see `Cache.inputs`.
    """

    pools: tuple[tuple[Pool, Pool], ...]
    rest: tuple[Array, ...]
    began: Array
    length: Array
    given: PyTree
    shapes: tuple[KVLayer, ...] = static()
    size: int = static()
    kind: Bounded = static()

    supports = frozenset({"trees"})

    def room(self, running: Array) -> Array | None:
        return self.rest[0].shape[2] + self.began - self.length if self.rest else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill or bias is not None:
            raise ValueError("cache: qaq reads a prompt as a whole, which only the model that answers does, and takes "
                             "no bias of the scores; give a draft model another cache")
        start, at, own = self.began[:, None], window.positions, k.shape[1] - q.shape[1]
        so_far = window_attention_lse(q, k, v, window.visible(), at - start, self.rest[layer], self.length - self.began,
                                      key_positions=window.key_positions - start, scale=scale, softcap=softcap)
        shape, (keys, values) = self.shapes[layer], self.pools[layer]
        slots = keys.bits.shape[1]
        block = min(BLOCK, slots)

        def part(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            def heads(pool: Pool, width: int) -> Array:
                cut = lambda x: lax.dynamic_slice_in_dim(x, i * block, block, 0)
                some = pool.replace(**{name: cut(getattr(pool, name))
                                       for name in ("starts", "bits", "means", "steps", "at", "outliers")})
                return decoded(some, shape.heads * width, q.dtype).reshape(block, shape.heads, width).swapaxes(0, 1)

            both = jax.vmap(lambda k, v: jnp.concatenate([heads(k, shape.width), heads(v, shape.both - shape.width)],
                                                         -1))(keys, values)
            held = jnp.clip(self.began - i * block, 0, block)
            return merge(so_far, prefix_attention(q, at, both, held, scale=scale, softcap=softcap))

        out, _ = lax.fori_loop(0, (self.began.max() + block - 1) // block, part, so_far)
        return out, (k[:, own:], v[:, own:])

    def commit(self, entries: Entries, slots: Array) -> BoundedCodes:
        if not self.rest:
            return self
        to = jnp.where(slots >= 0, slots - self.began[:, None], -1)
        rest = tuple(write(held, jnp.concatenate(entry, -1), to)
                     for held, entry in zip(self.rest, entries, strict=True))
        return self.replace(rest=rest, length=jnp.maximum(self.length, slots.max(1) + 1))

    def prefill_cache(self) -> Cache:
        if not self.rest:
            return self
        B, dtype, n = self.length.shape[0], self.rest[0].dtype, self.kind.last
        return PromptToBound(base=dense(self.shapes, B, self.size, dtype, self.given), kind=self.kind,
                             queries=tuple(jnp.zeros((B, n, s.queries or s.heads, s.width), dtype)
                                           for s in self.shapes), shapes=self.shapes)

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)


@struct
class PromptToBound(Wrapper):
    """A prompt that will be encoded. `queries`: of each layer those of its latest `n` tokens, `f[B, n, H, d]`, scaled,
    that of position `p` in place `p % n`."""

    base: Dense
    queries: tuple[Array, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: Bounded = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if options.get("sliding") is not None or options.get("softcap") is not None or options.get("bias") is not None:
            raise ValueError("cache: qaq takes a model without sliding windows, soft cap or bias of its scores")
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        return out, (*entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> PromptToBound:
        n = self.kind.last
        newest = jnp.maximum(self.base.length, slots.max(1) + 1)[:, None]
        to = jnp.where((slots >= 0) & (slots >= newest - n), slots % n, n)
        put = jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop"))
        queries = tuple(put(held, entry[2], to) for held, entry in zip(self.queries, entries, strict=True))
        return self.replace(base=self.base.commit([entry[:2] for entry in entries], slots), queries=queries)

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kind, base, made = self.kind, self.base, []
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        for shape, kv, queries, (keys, values) in zip(self.shapes, base.kv, self.queries, into.pools, strict=True):
            slots, sizes = keys.bits.shape[1], (keys.codes.shape[1], values.codes.shape[1])
            own = functools.partial(kind.pools, shape, slots, sizes)
            made.append(lax.map(lambda row, own=own: own(*row), (kv, queries, base.length)))
        return into.replace(pools=tuple(made), began=base.length, length=base.length)


@dataclasses.dataclass(frozen=True)
class Bounded(CacheConfig):
    """A `BoundedCodes` cache.

    Attributes:
        bits: the fewest and the most bits of a number, from 1 to 8. most: on the average of a pool, at most.
        error: the error that the outputs of attention may have, for keys and for values, from which the bounds follow.
        norm: of a query, in the bound for keys. last: the latest queries that say what is attended to; all of these
            tokens but the oldest take the most bits.
        outliers: which share of a token's numbers is kept as it is, half of it at each end.
        new: how many tokens there will be behind the prompt at most (`fit`); None: not known.
    """

    bits: tuple[int, int] = (1, 4)
    most: float = 3.0
    error: tuple[float, float] = (3.0, 3.0)
    norm: float = 300.0
    last: int = 5
    outliers: float = 0.01
    new: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits[0] <= self.bits[1] <= 8:
            raise ValueError(f"bits: got {self.bits}, takes the fewest and the most, from 1 to 8")
        if not self.bits[0] <= self.most:
            raise ValueError(f"most: got {self.most}, takes at least the fewest bits, {self.bits[0]}")
        if min(*self.error, self.norm) <= 0 or self.last < 1 or not 0 <= self.outliers < 1:
            raise ValueError(f"error, norm, last, outliers: got {self.error}, {self.norm}, {self.last} and "
                             f"{self.outliers}, takes numbers above 0, 1 or more, and 0 up to below 1")

    def fit(self, new: int) -> Bounded:
        return dataclasses.replace(self, new=new)

    def apart(self, numbers: int) -> tuple[int, int]:
        """Which of a token's numbers in their order are coded, from the first to the one behind the last."""
        if not self.outliers:
            return 0, numbers
        return math.ceil(self.outliers / 2 * numbers), math.floor((1 - self.outliers / 2) * numbers)

    def pools(self, shape: KVLayer, slots: int, sizes: tuple[int, int], kv: Array, queries: Array, length: Array
              ) -> tuple[Pool, Pool]:
        """Those of a layer of one row, `f[G, S, d + e]`, of whose tokens `length` (`i32[]`) are there."""
        kv, place = jnp.pad(kv, ((0, 0), (0, slots - kv.shape[1]), (0, 0))), jnp.arange(slots)
        flat = lambda x: x.swapaxes(0, 1).reshape(slots, -1)
        asked = length - self.last + jnp.arange(self.last)
        own = queries[asked % self.last].astype(jnp.float32).reshape(self.last, shape.heads, -1, shape.width)
        scores = jnp.einsum("ngrd,gsd->ngrs", own, kv[..., :shape.width].astype(jnp.float32))
        seen = (place <= asked[:, None]) & (asked >= 0)[:, None]
        paid = jax.nn.softmax(scores, axis=-1, where=seen[:, None, None]).max((0, 1, 2))
        valid, late = place < length, place > length - self.last
        keys = encoded(flat(kv[..., :shape.width]), key_error(length, self.error[0], self.norm), valid, late, self,
                       sizes[0])
        values = encoded(flat(kv[..., shape.width:]), value_error(length, self.error[1], paid), valid, late, self,
                         sizes[1])
        return keys, values

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> BoundedCodes:
        """An empty cache."""
        zeros = lambda *dims, of=dtype: jnp.zeros((batch, *dims), of)
        slots = size if size <= BLOCK else -(-size // BLOCK) * BLOCK

        def pool(numbers: int) -> Pool:
            if numbers % 8 or numbers > 1 << 16:
                raise ValueError(f"width: got {numbers} numbers of a layer's keys or values, takes a multiple of 8 up "
                                 "to 65536")
            low, high = self.apart(numbers)
            if high - low < 1:
                raise ValueError(f"outliers: got {self.outliers}, which leaves nothing of {numbers} numbers to code")
            return Pool(codes=zeros(math.ceil(min(self.most, self.bits[1]) * slots * numbers / 8), of=jnp.uint8),
                        starts=zeros(slots, of=jnp.int32), bits=zeros(slots, of=jnp.uint8),
                        means=zeros(slots, of=jnp.float32), steps=zeros(slots, of=jnp.float32),
                        at=zeros(slots, numbers - high + low, of=jnp.uint16),
                        outliers=zeros(slots, numbers - high + low))

        behind = size if self.new is None else min(self.new + 1, size)
        behind = behind if behind <= WALK else -(-behind // WALK) * WALK
        pools = tuple((pool(s.heads * s.width), pool(s.heads * (s.both - s.width))) for s in shapes)
        none = zeros(of=jnp.int32)
        return BoundedCodes(pools=pools, rest=tuple(zeros(s.heads, behind, s.both) for s in shapes), began=none,
                            length=none, given=inputs, shapes=shapes, size=size, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
