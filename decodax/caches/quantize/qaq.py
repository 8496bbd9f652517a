"""QAQ: the number of bits of each token is derived from a bound of its error ("QAQ: Quality Adaptive Quantization for
LLM KV Cache", Dong et al., 2024).

Attention is more sensitive to errors of keys than to those of values. So each token of a prompt gets the smallest
number of bits that its bound allows. All keys have the same bound; the bound of a value is tighter, the more the latest
queries attend to the token. The largest and smallest numbers of a token are outliers, which are not quantized.

Codes of different widths are concatenated in a pool of bytes of fixed size: `mean_bits` for each number on average. If
a text needs more, the widest codes get fewer bits until it fits. Tokens after the prompt are not quantized.

Bits and numbers are those of the authors' code (f8d47e0) with uniform codes, stored in a bounded pool. At least one
bit is kept. A prompt is encoded once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import KVLayer
from decodax.cache.dense import dense_like
from decodax.cache.entry import own_entry
from decodax.cache.key_values import FittedConfig, Score, refuse_prefill
from decodax.cache.tail import Tail
from decodax.caches.asking import AskingDense
from decodax.caches.quantize.quantized import BLOCK
from decodax.common.options import Count, Positive, Range, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, WholePrompt
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, whole_blocks


@struct
class Pool(Struct):
    """The keys or the values of a prompt in one layer, for one row or several. The codes of all numbers of a token form
    one unit of bytes.

    Attributes:
        codes: `u8[..., P]`, the concatenated units.
        starts: `i32[..., S]`, the first byte of each unit.
        bits: `u8[..., S]`, number of bits of each number of a unit.
        means, steps: `f32[..., S]`, mean and quantization step of each unit.
        at: `u16[..., S, o]`, indices of the outliers of a token.
        outliers: `f[..., S, o]`, the outliers.
    """

    codes: Array
    starts: Array
    bits: Array
    means: Array
    steps: Array
    at: Array
    outliers: Array


def needed(spread: Array, error: Array | float, least: int, most: int) -> Array:
    """Returns the smallest number of bits with which each token's numbers are quantized to an error of at most `error`,
    clipped to `least` and `most`: `i32[S]`.

    Args:
        spread: `f32[S]`, difference between the largest and the smallest number of each token.
        error: allowed error, `f32[S]` or one for all tokens.
        least, most: minimum and maximum number of bits.
    """
    bits = jnp.ceil(jnp.log2(spread / (2 * error) + 1))
    return jnp.clip(jnp.where(jnp.isfinite(bits), bits, least), least, most).astype(jnp.int32)


def key_error(length: Array, target: float, norm: float) -> Array:
    """Returns the quantization error of keys that keeps the error of attention's output below `target`, `f32[]`.

    Args:
        length: number of tokens of the text.
        target: allowed error of the output.
        norm: norm of the queries.
    """
    n = length.astype(jnp.float32)
    return jnp.sqrt(12 / norm * jnp.log(n**3 / jnp.maximum(n - 1, 1) * target**2 + 1))


def value_error(length: Array, target: float, paid: Array) -> Array:
    """Returns the quantization error of each token's value that keeps the error of attention's output below `target`,
    `f32[S]`.

    Args:
        length: number of tokens of the text.
        target: allowed error of the output.
        paid: `f32[S]`, maximum attention weight of each token.
    """
    return jnp.sqrt(12 / jnp.maximum(length, 1).astype(jnp.float32)) * target / paid


def encoded(x: Array, error: Array | float, valid: Array, late: Array, kind: QAQConfig, size: int) -> Pool:
    """Encodes the keys or values `f[S, N]` of a row into a pool of `size` bytes.

    Args:
        x: the numbers of each token.
        error: allowed error of each token, `f32[S]`, or one for all.
        valid: `bool[S]`, True for tokens that exist.
        late: `bool[S]`, True for tokens that always get the maximum number of bits.
        kind: the configuration.
        size: number of bytes of the pool.
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
    """Returns the decoded numbers, `f[S, N]` with `N = numbers`. All arrays of `pool` except `codes` may be slices."""
    bits = pool.bits.astype(jnp.int32)[:, None]
    bit = bits * jnp.arange(numbers)
    byte = pool.starts[:, None] + (bit >> 3)
    read = lambda at: pool.codes[jnp.minimum(at, pool.codes.shape[0] - 1)].astype(jnp.int32)
    found = (read(byte) | read(byte + 1) << 8) >> (bit & 7) & ((1 << bits) - 1)
    x = (found - 2.0 ** (bits - 1)) * pool.steps[:, None] + pool.means[:, None]
    put = jax.vmap(lambda row, at, own: row.at[at.astype(jnp.int32)].set(own))
    return put(x.astype(dtype), pool.at, pool.outliers.astype(dtype))


@struct
class QAQCache(Tail, WholePrompt):
    """A cache with the keys and values of the prompt in pools of codes of different widths, and those of later tokens
    unquantized.

    Attributes:
        pools: for each layer a `Pool` of keys and one of values.
        start: `i32[B]`, number of prefilled tokens.
        kv, length, given, size, shapes, kind: see `Tail`.
    """

    pools: tuple[tuple[Pool, Pool], ...]
    start: Array

    if TYPE_CHECKING:
        kind: QAQConfig

    def check_windows(self) -> None:
        refuse_prefill("qaq")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        at = window.positions
        so_far = self.attend_tail(layer, q, k, v, window, scale=scale, softcap=softcap, sinks=sinks)
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
            held = jnp.clip(self.start - i * block, 0, block)
            return merge(so_far, prefix_attention(q, at, both, held, scale=scale, softcap=softcap))

        out, _ = lax.fori_loop(0, (self.start.max() + block - 1) // block, part, so_far)
        return out, own_entry(q, k, v)

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        B, dtype, n = self.length.shape[0], self.kv[0].dtype, self.kind.last_n_attentions
        return PromptToEncode(base=dense_like(self), kind=self.kind,
                             queries=tuple(jnp.zeros((B, n, s.queries or s.heads, s.width), dtype)
                                           for s in self.shapes), shapes=self.shapes)


@struct
class PromptToEncode(AskingDense):
    """QAQ's cache during prefill, with all tokens of the prompt in `base`. `finish_prefill` encodes them.

    Attributes:
        queries: for each layer `f[B, n, H, d]`, scaled queries of the latest `n` tokens; that of position `p` at index
            `p % n`.
    """

    queries: tuple[Array, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: QAQConfig = static()

    def commit(self, entries: Entries, slots: Array) -> PromptToEncode:
        n = self.kind.last_n_attentions
        newest = jnp.maximum(self.base.length, slots.max(1) + 1)[:, None]
        to = jnp.where((slots >= 0) & (slots >= newest - n), slots % n, n)
        put = jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop"))
        queries = tuple(put(held, entry.queries, to) for held, entry in zip(self.queries, entries, strict=True))
        return super().commit(entries, slots).replace(queries=queries)

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        kind, base, made = self.kind, self.base, []
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        for shape, kv, queries, (keys, values) in zip(self.shapes, base.kv, self.queries, into.pools, strict=True):
            slots, sizes = keys.bits.shape[1], (keys.codes.shape[1], values.codes.shape[1])
            own = functools.partial(kind.pools, shape, slots, sizes)
            made.append(lax.map(lambda row, own=own: own(*row), (kv, queries, base.length)))
        return into.replace(pools=tuple(made), start=base.length, length=base.length)


@CACHES.register("qaq", "QAQ: Quality Adaptive Quantization for LLM KV Cache", "Dong et al. 2024", family="quantize")
@dataclasses.dataclass(frozen=True)
class QAQConfig(FittedConfig):
    """Keeps each token of a prompt in as many bits as the bound of its error needs; later tokens are not quantized.

    For long prompts with short answers. It needs a model without sliding windows, soft caps and biases of its scores.

    Attributes:
        bits: minimum and maximum number of bits of a number, from 1 to 8.
        mean_bits: mean number of bits of a number over a prompt, for which there is memory.
        target_quantization_error: error of the outputs of attention from which the bounds are derived, for keys and for
            values.
        q_norm: norm of a query, in the bound for keys.
        last_n_attentions: number of latest queries whose attention is measured; their own tokens get the maximum number
            of bits.
        outliers_ratio: share of a token's numbers that are not quantized, half of them at each end.
    """

    bits: tuple[Annotated[int, Range(1, 8)], Annotated[int, Range(1, 8)]] = (1, 4)
    mean_bits: Annotated[float, Range(1, 8)] = 3.0
    target_quantization_error: tuple[Positive, Positive] = (3.0, 3.0)
    q_norm: Positive = 300.0
    last_n_attentions: Count = 5
    outliers_ratio: Annotated[float, Range(0, 1, below=True)] = 0.01

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        if len(self.bits) != 2 or self.bits[0] > self.bits[1]:
            raise ValueError(f"bits: got {self.bits}, takes the fewest and the most, from 1 to 8")
        if not self.bits[0] <= self.mean_bits:
            raise ValueError(f"mean_bits: got {self.mean_bits}, takes at least the fewest bits, {self.bits[0]}")

    def apart(self, numbers: int) -> tuple[int, int]:
        """Returns start and stop of the slice of a token's `numbers` sorted numbers that are encoded. Those before and
        after it are outliers, which are stored unquantized."""
        if not self.outliers_ratio:
            return 0, numbers
        return math.ceil(self.outliers_ratio / 2 * numbers), math.floor((1 - self.outliers_ratio / 2) * numbers)

    def pools(self, shape: KVLayer, slots: int, sizes: tuple[int, int], kv: Array, queries: Array, length: Array
              ) -> tuple[Pool, Pool]:
        """Encodes a layer of one row into a pool of keys and one of values.

        Args:
            shape: shape of the layer.
            slots: number of tokens of a pool.
            sizes: numbers of bytes of both pools.
            kv: `f[G, S, d + e]`, keys and values.
            queries: `f[n, H, d]`, the latest queries, as in `PromptToEncode`.
            length: `i32[]`, number of tokens.
        """
        kv, place = jnp.pad(kv, ((0, 0), (0, slots - kv.shape[1]), (0, 0))), jnp.arange(slots)
        n, errors = self.last_n_attentions, self.target_quantization_error
        flat = lambda x: x.swapaxes(0, 1).reshape(slots, -1)
        asked = length - n + jnp.arange(n)
        own = queries[asked % n].astype(jnp.float32).reshape(n, shape.heads, -1, shape.width)
        scores = jnp.einsum("ngrd,gsd->ngrs", own, kv[..., :shape.width].astype(jnp.float32))
        seen = (place <= asked[:, None]) & (asked >= 0)[:, None]
        paid = jax.nn.softmax(scores, axis=-1, where=seen[:, None, None]).max((0, 1, 2))
        valid, late = place < length, place > length - n
        bounds = key_error(length, errors[0], self.q_norm), value_error(length, errors[1], paid)
        keys, values = (encoded(flat(x), bound, valid, late, self, size) for x, bound, size in zip(
            (kv[..., :shape.width], kv[..., shape.width:]), bounds, sizes, strict=True))
        return keys, values

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("sliding windows", "soft caps", "biases"))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> QAQCache:
        zeros = lambda *dims, of=dtype: jnp.zeros((batch, *dims), of)
        slots = whole_blocks(size, BLOCK)

        def pool(numbers: int) -> Pool:
            if numbers % 8 or numbers > 1 << 16:
                raise ValueError(f"width: got {numbers} numbers of a layer's keys or values, takes a multiple of 8 up "
                                 "to 65536")
            low, high = self.apart(numbers)
            if high - low < 1:
                raise ValueError(f"outliers_ratio: got {self.outliers_ratio}, which leaves none of {numbers} numbers")
            return Pool(codes=zeros(math.ceil(min(self.mean_bits, self.bits[1]) * slots * numbers / 8), of=jnp.uint8),
                        starts=zeros(slots, of=jnp.int32), bits=zeros(slots, of=jnp.uint8),
                        means=zeros(slots, of=jnp.float32), steps=zeros(slots, of=jnp.float32),
                        at=zeros(slots, numbers - high + low, of=jnp.uint16),
                        outliers=zeros(slots, numbers - high + low))

        later = whole_blocks(size if self._new is None else min(self._new + 1, size))
        pools = tuple((pool(s.heads * s.width), pool(s.heads * (s.both - s.width))) for s in shapes)
        none = zeros(of=jnp.int32)
        return QAQCache(pools=pools, kv=tuple(zeros(s.heads, later, s.both) for s in shapes), start=none,
                            length=none, given=inputs, shapes=shapes, size=size, kind=self)
