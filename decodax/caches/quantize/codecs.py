"""Codecs: how keys and values are written in fewer bytes. One class is one published rule.

A codec takes tokens that follow one another, `unit` of them or a multiple, and its codes of one unit do not depend on
the next. `Coded` keeps the codes, and the latest tokens as they are.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import ReadPrompt

PyTree = Any


@struct
class Codes(Struct):
    """Numbers in few bits.

    Attributes:
        codes: `u8[..., n * bits / 8]`, number `i` in bits `bits * (i // m)` of byte `i % m`, of `m` bytes.
        steps, lows: of each group.
    """

    codes: Array
    steps: Array
    lows: Array


def pack(codes: Array, bits: int) -> Array:
    """`u8[..., n]` below `2^bits` as `u8[..., n * bits / 8]`."""
    each = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], each, -1)
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return (parts << shifts).sum(-2, dtype=jnp.uint8)


def unpack(codes: Array, bits: int) -> Array:
    """The inverse of `pack`."""
    each = 8 // bits
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return ((codes[..., None, :] >> shifts) & ((1 << bits) - 1)).reshape(*codes.shape[:-1], -1)


def quantized(x: Array, bits: int, axis: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Codes `u8` of the shape of `x`, steps and lows without the axis over which a group runs."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    # one bit stands for the middles of both halves of the range: its ends would be too large (SpeCache)
    low, step = ((3 * low + high) / 4, (high - low) / 2) if bits == 1 else (low, (high - low) / (2**bits - 1))
    codes = jnp.round(jnp.clip((x - low) / jnp.where(step > 0, step, 1), 0, 2**bits - 1)).astype(jnp.uint8)
    return codes, step.squeeze(axis).astype(dtype), low.squeeze(axis).astype(dtype)


def of_keys(x: Array, bits: int, group: int) -> Codes:
    """`f[G, S, d]`, whose groups are `group` tokens of a channel: steps `f[G, S / group, d]`."""
    G, S, d = x.shape
    codes, steps, lows = quantized(x.reshape(G, -1, group, d), bits, 2, x.dtype)
    return Codes(codes=pack(codes.reshape(G, S, d), bits), steps=steps, lows=lows)


def of_values(x: Array, bits: int, group: int) -> Codes:
    """`f[G, S, e]`, whose groups are `group` channels of a token: steps `f[G, S, e / group]`."""
    G, S, e = x.shape
    codes, steps, lows = quantized(x.reshape(G, S, -1, group), bits, 3, x.dtype)
    return Codes(codes=pack(codes.reshape(G, S, e), bits), steps=steps, lows=lows)


def keys_of(own: Codes, bits: int, group: int, dtype: Any) -> Array:
    """What codes of keys stand for."""
    wide = lambda x: jnp.repeat(x, group, axis=-2)
    return unpack(own.codes, bits).astype(dtype) * wide(own.steps) + wide(own.lows)


def values_of(own: Codes, bits: int, group: int, dtype: Any) -> Array:
    """What codes of values stand for."""
    wide = lambda x: jnp.repeat(x, group, axis=-1)
    return unpack(own.codes, bits).astype(dtype) * wide(own.steps) + wide(own.lows)


@struct
class Span(Struct):
    """Where tokens that are written or read together stand, for codecs that ask.

    Attributes:
        start: `i32[]`, the position of the first one; the others follow.
        study: what the codec has learned of this layer of this row's prompt (`Codec.study`).
        layer: the layer's number.
        below: what the layer before says of these tokens (`Codec.below`); None: there is no layer before, or it says
            nothing.
    """

    start: Array
    study: PyTree
    layer: int = static()
    below: PyTree = None


class Codec(abc.ABC):
    """Derive a frozen dataclass from this. It is compared by value, and static under jit.

    Attributes:
        places: whether it has to know at which positions tokens stand.
        stacked: whether a layer can be read behind those before it alone: then `decode` is given the codes of all
            layers up to its own, which have one shape, and `encode` what the layer before says (`below`).
    """

    places: ClassVar[bool] = False
    stacked: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def unit(self) -> int:
        """How many tokens are written together."""

    @abc.abstractmethod
    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> PyTree:
        """The codes of `f[G, n, d + e]`, a layer's keys and values of one row, `n` a multiple of `unit`: a pytree of
        arrays `[G, n * c, ...]`, where `c` may be another number for each; an axis of 1 in place of `G` where heads are
        written together."""

    @abc.abstractmethod
    def decode(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span | None = None) -> Array:
        """What they stand for, `f[G, n, d + e]`."""

    def below(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span) -> PyTree:
        """What a layer, of whose tokens these are the codes, says to the one behind it: arrays `[n, ...]`; None:
        nothing."""
        return None

    def reads(self, layer: int, coded: Array, study: PyTree) -> Array | None:
        """`i32[B, G]`: how many of the first tokens of a text each head reads, of `coded` (`i32[B]`) that are written;
        None: all."""
        return None

    def start(self, shape: KVLayer, batch: int) -> PyTree:
        """What it has gathered of an empty prompt, in one layer: arrays `[B, ...]`; None: it gathers nothing."""
        return None

    def gather(self, shape: KVLayer, gathered: PyTree, queries: Array, live: Array) -> PyTree:
        """With a prompt's queries `f[B, W, H, d]`, rotated, where `live` (`bool[B, W]`)."""
        return gathered

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[PyTree]:
        """What it has to know of each layer of a prompt, arrays `[B, ...]`, for all that will be written and read.

        Args:
            kv: `f[B, G, S, d + e]` of each layer, of which the first `length` (`i32[B]`) tokens count.
            gathered: of each layer. prompt: None before there is one, for the shapes alone.
        """
        return [None] * len(shapes)

    def check(self, shape: KVLayer) -> None:        # noqa: B027
        """Raises ValueError where it does not take a layer of this shape."""


def _bits(**given: int) -> None:
    for name, bits in given.items():
        if bits not in (2, 4, 8):
            raise ValueError(f"{name}: got {bits}, takes 2, 4 or 8")


@dataclasses.dataclass(frozen=True)
class Affine(Codec):
    """Keys by channel and values by token ("KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", Liu et al.,
    2024).

    Codes are `round((x - low) / step)` with `step = (high - low) / (2^bits - 1)`. A group of keys is one channel of
    `group` tokens that follow one another, since single channels of keys are large; a group of values is `group`
    channels of one token, or all of them where the width is no multiple of `group`.

    Attributes:
        key_bits, value_bits: 2, 4 or 8. group: numbers that share a step.
    """

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        _bits(key_bits=self.key_bits, value_bits=self.value_bits)
        if self.group < 1:
            raise ValueError(f"group: got {self.group}, takes 1 or more")

    @property
    def unit(self) -> int:
        return self.group

    def group_of(self, width: int) -> int:
        """Channels of a value that share a step."""
        return self.group if width % self.group == 0 else width

    def check(self, shape: KVLayer) -> None:
        for name, width, bits in (("width", shape.width, self.key_bits),
                                  ("value_width", shape.both - shape.width, self.value_bits)):
            if width * bits % 8:
                raise ValueError(f"{name}: got heads of {width}, takes a multiple of {8 // bits} with {bits} bits")

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Codes, Codes]:
        keys, values = kv[..., :shape.width], kv[..., shape.width:]
        return (of_keys(keys, self.key_bits, self.group),
                of_values(values, self.value_bits, self.group_of(values.shape[-1])))

    def decode(self, shape: KVLayer, codes: tuple[Codes, Codes], dtype: Any,
               span: Span | None = None) -> Array:
        keys, values = codes
        return jnp.concatenate([
            keys_of(keys, self.key_bits, self.group, dtype),
            values_of(values, self.value_bits, self.group_of(shape.both - shape.width), dtype)], -1)


@dataclasses.dataclass(frozen=True)
class QuarterPoints(Affine):
    """As `Affine` with one bit, which stands for the numbers at a quarter and at three quarters of a group's range
    ("SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs", Jie et al., 2025)."""

    key_bits: int = 1
    value_bits: int = 1

    def __post_init__(self) -> None:
        if (self.key_bits, self.value_bits) != (1, 1) or self.group < 1:
            raise ValueError(f"key_bits, value_bits, group: got {self.key_bits}, {self.value_bits} and {self.group}, "
                             "takes 1, 1 and 1 or more")


@dataclasses.dataclass(frozen=True)
class HierarchicalAffine(Codec):
    """4 bits as in `Affine`, and 4 bits more of what they leave over, which a draft does not read ("QuantSpec:
    Self-Speculative Decoding with Hierarchical Quantized KV Cache", Tiwari et al., 2025).

    A number is `low + step * upper` to a draft and `low + step * (upper + lower / 16)` to the model that answers, with
    `lower` from -8 to 7.

    Attributes:
        group: numbers that share a step. lower: whether both halves are read.
    """

    group: int = 128
    lower: bool = True

    @property
    def unit(self) -> int:
        return self.group

    @property
    def _affine(self) -> Affine:
        return Affine(4, 4, self.group)

    def check(self, shape: KVLayer) -> None:
        self._affine.check(shape)

    def encode(self, shape: KVLayer, kv: Array,
               span: Span | None = None) -> tuple[tuple[Codes, Codes], tuple[Array, Array]]:
        upper = self._affine.encode(shape, kv)
        rest = kv - self._affine.decode(shape, upper, kv.dtype)
        steps = self._steps(shape, upper)
        lower = jnp.clip(jnp.round(rest / jnp.where(steps > 0, steps, 1) * 16), -8, 7) + 8
        keys, values = jnp.split(lower.astype(jnp.uint8), [shape.width], -1)
        return upper, (pack(keys, 4), pack(values, 4))

    def decode(self, shape: KVLayer, codes: tuple[tuple[Codes, Codes], tuple[Array, Array]], dtype: Any,
               span: Span | None = None) -> Array:
        upper, lower = codes
        whole = self._affine.decode(shape, upper, dtype)
        if not self.lower:
            return whole
        below = jnp.concatenate([unpack(x, 4) for x in lower], -1).astype(dtype)
        return whole + self._steps(shape, upper) * (below - 8) / 16

    def _steps(self, shape: KVLayer, upper: tuple[Codes, Codes]) -> Array:
        keys, values = upper
        return jnp.concatenate([jnp.repeat(keys.steps, self.group, -2),
                                jnp.repeat(values.steps, self._affine.group_of(shape.both - shape.width), -1)], -1)


@struct
class GEARCodes(Struct):
    """What GEAR keeps of keys or of values.

    Attributes:
        coarse: few bits. small, large: the outliers, `f[..., k]` each. at: `i16[..., 2 k]`, where they stand.
        left, right: `f[G, n, r]` and `f[G, n / unit * d, r]`, whose product is close to what the rest leaves over.
    """

    coarse: Codes
    small: Array
    large: Array
    at: Array
    left: Array
    right: Array


@dataclasses.dataclass(frozen=True)
class Approximated(Codec):
    """Few bits, without outliers, and a matrix of low rank for what they leave over ("GEAR: An Efficient KV Cache
    Compression Recipe for Near-Lossless Generative Inference of LLM", Kang et al., 2024).

    The largest and the smallest numbers of a channel of keys, or of a token's values, stand for themselves; in their
    places the mean is quantised. The remaining error of `buffer` tokens of a head is approximated by the rank `rank`,
    found by power iteration.

    The authors compress a prompt as one matrix and later tokens `buffer` at a time; here a prompt is cut in the same
    way, so that a text means the same however it was read. Their levels are `bits^2 - 1`, which is `2^bits - 1` for 2
    and 4 bits, as here. Outliers of values are those of each head; theirs are of all heads.

    Attributes:
        bits: 2, 4 or 8. group: numbers that share a step. buffer: tokens that are written together.
        outliers: the share of numbers that are, of a line at least one on each side; 0: none.
        rank: of the approximation. loops: of the power iteration.
    """

    bits: int = 4
    group: int = 64
    buffer: int = 64
    outliers: float = 0.02
    rank: int = 4
    loops: int = 3

    def __post_init__(self) -> None:
        _bits(bits=self.bits)
        if self.group < 1 or self.buffer < 1 or self.buffer % self.group:
            raise ValueError(f"buffer: got {self.buffer}, takes a multiple of the group of {self.group}")
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers: got {self.outliers}, takes a share from 0 to 1")
        if self.rank < 1 or self.loops < 1:
            raise ValueError(f"rank, loops: got {self.rank} and {self.loops}, takes 1 or more")

    @property
    def unit(self) -> int:
        return self.buffer

    @property
    def _affine(self) -> Affine:
        return Affine(self.bits, self.bits, self.group)

    def check(self, shape: KVLayer) -> None:
        self._affine.check(shape)

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[GEARCodes, GEARCodes]:
        keys, values = kv[..., :shape.width], kv[..., shape.width:]
        return self._encode(keys, True), self._encode(values, False)

    def decode(self, shape: KVLayer, codes: tuple[GEARCodes, GEARCodes], dtype: Any,
               span: Span | None = None) -> Array:
        keys, values = codes
        return jnp.concatenate([self._decode(keys, shape.width, True, dtype),
                                self._decode(values, shape.both - shape.width, False, dtype)], -1)

    def _encode(self, x: Array, keys: bool) -> GEARCodes:
        G, n, d = x.shape
        lines = self._lines(x, keys)
        k = max(int(lines.shape[-1] * self.outliers / 2), 1 if self.outliers else 0)
        order = jnp.argsort(lines, axis=-1)
        at = jnp.concatenate([order[..., :k], order[..., lines.shape[-1] - k:]], -1)
        out = jnp.take_along_axis(lines, at, -1)
        mean = jnp.broadcast_to(lines.mean(-1, keepdims=True), out.shape)
        plain = self._back(jnp.put_along_axis(lines, at, mean, -1, inplace=False), x.shape, keys)
        own = GEARCodes(coarse=of_keys(plain, self.bits, self.group) if keys else
                        of_values(plain, self.bits, self._affine.group_of(d)),
                        small=out[..., :k], large=out[..., k:], at=at.astype(jnp.int16),
                        left=jnp.zeros((G, n, self.rank), x.dtype),
                        right=jnp.zeros((G, n // self.buffer * d, self.rank), x.dtype))
        own = own.replace(**{name: self._flat(getattr(own, name), n) for name in ("small", "large", "at")})
        error = (x - self._decode(own, d, keys, x.dtype)).reshape(G, -1, self.buffer, d).astype(jnp.float32)
        rank = min(self.rank, self.buffer, d)
        right = jax.random.uniform(jax.random.key(0), (d, rank), jnp.float32)
        right = jnp.broadcast_to(right, (*error.shape[:2], d, rank))
        for i in range(self.loops):
            last = i == self.loops - 1
            left = error @ (jnp.linalg.qr(right)[0] if last else right)
            left = jnp.linalg.qr(left)[0] if last else left
            right = error.swapaxes(2, 3) @ left
        wide = lambda x: jnp.pad(x.astype(own.left.dtype), [(0, 0)] * 3 + [(0, self.rank - rank)])
        return own.replace(left=wide(left).reshape(own.left.shape), right=wide(right).reshape(own.right.shape))

    def _decode(self, own: GEARCodes, d: int, keys: bool, dtype: Any) -> Array:
        coarse = own.coarse
        plain = keys_of(coarse, self.bits, self.group, dtype) if keys else \
            values_of(coarse, self.bits, self._affine.group_of(d), dtype)
        G, n = plain.shape[:2]
        lines = self._lines(plain, keys)
        unflat = lambda x: x.reshape(*lines.shape[:-1], x.shape[-1]) if lines.ndim == 4 else x
        small, large, at = (unflat(x) for x in (own.small, own.large, own.at))
        lines = jnp.put_along_axis(lines, at.astype(jnp.int32), jnp.concatenate([small, large], -1).astype(dtype), -1,
                                   inplace=False) if at.shape[-1] else lines
        left, right = own.left.reshape(G, -1, self.buffer, self.rank), own.right.reshape(G, -1, d, self.rank)
        error = (left @ right.swapaxes(2, 3)).reshape(G, n, d)
        return self._back(lines, plain.shape, keys) + error.astype(dtype)

    def _lines(self, x: Array, keys: bool) -> Array:
        """The lines that outliers are sought in: channels of a buffer `[G, n / buffer, d, buffer]`, or tokens."""
        return x.reshape(x.shape[0], -1, self.buffer, x.shape[-1]).swapaxes(2, 3) if keys else x

    def _back(self, lines: Array, shape: tuple[int, ...], keys: bool) -> Array:
        return lines.swapaxes(2, 3).reshape(shape) if keys else lines

    def _flat(self, x: Array, n: int) -> Array:
        """With the tokens' axis in its place, for lines of channels."""
        return x.reshape(len(x), x.shape[1] * x.shape[2], x.shape[3]) if x.ndim == 4 else x


@struct
class Sparse(Struct):
    """The largest numbers of each token: `f[G, n, k]`, and in `u8[G, n, d / 8]` a bit for each that says whether it is
    one of them."""

    kept: Array
    which: Array


@dataclasses.dataclass(frozen=True)
class Largest(Codec):
    """The numbers of largest magnitude of each token's key and value; the others count as 0 ("Mustafar: Promoting
    Unstructured Sparsity for KV Cache Pruning in LLM Inference", Joo et al., 2025: per-token magnitude, of both).

    As in the authors' code, those from the `int(sparsity * d)`-th smallest on stay.

    Attributes:
        key_sparsity, value_sparsity: the shares that go.
    """

    key_sparsity: float = 0.5
    value_sparsity: float = 0.5

    def __post_init__(self) -> None:
        for name in ("key_sparsity", "value_sparsity"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 0 to 1, without 1")

    @property
    def unit(self) -> int:
        return 1

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Sparse, Sparse]:
        return (self._encode(kv[..., :shape.width], self.key_sparsity),
                self._encode(kv[..., shape.width:], self.value_sparsity))

    def decode(self, shape: KVLayer, codes: tuple[Sparse, Sparse], dtype: Any,
               span: Span | None = None) -> Array:
        widths = shape.width, shape.both - shape.width
        return jnp.concatenate([self._decode(own, d, dtype) for own, d in zip(codes, widths, strict=True)], -1)

    def _encode(self, x: Array, sparsity: float) -> Sparse:
        d = x.shape[-1]
        count = d - max(1, int(sparsity * d)) + 1
        at = jnp.sort(jnp.argsort(jnp.abs(x), axis=-1)[..., d - count:], axis=-1)
        marks = jnp.put_along_axis(jnp.zeros(x.shape, jnp.uint8), at, jnp.uint8(1), -1, inplace=False)
        marks = jnp.pad(marks, ((0, 0), (0, 0), (0, -d % 8)))
        return Sparse(kept=jnp.take_along_axis(x, at, -1), which=pack(marks, 1))

    def _decode(self, own: Sparse, d: int, dtype: Any) -> Array:
        marks = unpack(own.which, 1)[..., :d].astype(jnp.int32)
        rank = jnp.maximum(jnp.cumsum(marks, -1) - 1, 0)
        return jnp.where(marks > 0, jnp.take_along_axis(own.kept, rank, -1), 0).astype(dtype)
