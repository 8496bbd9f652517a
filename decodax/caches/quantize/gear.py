"""GEAR: quantization with separate outliers and a low-rank approximation of the error ("GEAR: An Efficient KV Cache
Compression Recipe for Near-Lossless Generative Inference of LLM", Kang et al., 2024).

A prompt is compressed in buffers, like later tokens, and outliers of values are found in each head; the authors
compress the prompt as one matrix.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.quantize.codecs import Codec, Codes, Span
from decodax.caches.quantize.kivi import (
    Bits,
    KIVICodec,
    check_bits,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.options import Count, Range
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, struct


@struct
class GEARCodes(Struct):
    """The codes of keys or of values.

    Attributes:
        coarse: quantized numbers.
        small, large: `f[..., k]` each, the smallest and largest numbers of a line, its outliers.
        at: `i16[..., 2 k]`, indices of the outliers.
        left, right: `f[G, n, r]` and `f[G, n / unit * d, r]`, factors of the approximated error.
    """

    coarse: Codes
    small: Array
    large: Array
    at: Array
    left: Array
    right: Array


@dataclasses.dataclass(frozen=True)
class GEARCodec(Codec):
    """Stores quantized numbers, their outliers, and a low-rank approximation of the error.

    The largest and the smallest numbers of each line, which is a channel of keys or a token's value, are stored
    exactly, and the mean is quantized in their place. The remaining error of `buffer` tokens of a head is approximated
    by a matrix of rank `rank`, found by power iteration.

    The authors compress a prompt as one matrix, and later tokens `buffer` at a time. Here a prompt is cut in the same
    way, so that the codes of a text do not depend on where the prompt ends. Their code has `bits^2 - 1` levels, which
    equals `2^bits - 1` for 2 and 4 bits. Here outliers of values are found in each head, by the authors in all heads
    together.

    Attributes:
        bits: number of bits of a number: 2, 4 or 8.
        group_size: number of values that share a quantization step.
        buffer: number of tokens that are encoded together.
        outliers: share of numbers that are outliers, at least one at each end of a line; 0: none.
        rank: rank of the approximated error.
        loops: number of power iterations.
    """

    bits: int = 4
    group_size: int = 64
    buffer: int = 64
    outliers: float = 0.02
    rank: int = 4
    loops: int = 3

    def __post_init__(self) -> None:
        check_bits(bits=self.bits)
        if self.group_size < 1 or self.buffer < 1 or self.buffer % self.group_size:
            raise ValueError(f"buffer: got {self.buffer}, takes a multiple of the group size of {self.group_size}")
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers: got {self.outliers}, takes a share from 0 to 1")
        if self.rank < 1 or self.loops < 1:
            raise ValueError(f"rank, loops: got {self.rank} and {self.loops}, takes 1 or more")

    @property
    def unit(self) -> int:
        return self.buffer

    @property
    def _kivi(self) -> KIVICodec:
        return KIVICodec(self.bits, self.bits, self.group_size)

    def check(self, shape: KVLayer) -> None:
        self._kivi.check(shape)

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
        own = GEARCodes(coarse=quantize_keys(plain, self.bits, self.group_size) if keys else
                        quantize_values(plain, self.bits, self._kivi.value_group(d)),
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
        plain = dequantize_keys(coarse, self.bits, self.group_size, dtype) if keys else \
            dequantize_values(coarse, self.bits, self._kivi.value_group(d), dtype)
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
        """Returns the lines in which outliers are found: for keys the channels of each buffer, `[G, n / buffer, d,
        buffer]`, for values the tokens, `[G, n, d]`."""
        return x.reshape(x.shape[0], -1, self.buffer, x.shape[-1]).swapaxes(2, 3) if keys else x

    def _back(self, lines: Array, shape: tuple[int, ...], keys: bool) -> Array:
        return lines.swapaxes(2, 3).reshape(shape) if keys else lines

    def _flat(self, x: Array, n: int) -> Array:
        """Merges the axes of buffers and channels of lines, if `x` has both."""
        return x.reshape(len(x), x.shape[1] * x.shape[2], x.shape[3]) if x.ndim == 4 else x


@CACHES.register("gear", "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
                 "Kang et al. 2024", family="quantize")
def gear(bits: Bits = 4, group_size: Count = 64, buffer: Count = 64,
         outliers: Annotated[float, Range(0, 1, below=True)] = 0.02, rank: Count = 4,
         loops: Count = 3) -> QuantizedConfig:
    """Keeps all tokens in 4 bits with their outliers, and a low-rank approximation of the quantization error.

    More accurate than `kivi` at the same bits, but encoding and decoding are slower.

    Args:
        bits: number of bits of each number.
        group_size: number of values that share a scale.
        buffer: number of tokens that are encoded together; the latest tokens are unquantized until there are that many.
            A multiple of `group_size`.
        outliers: share of numbers that are stored exactly, half of them at each end.
        rank: rank of the approximated error.
        loops: number of power iterations that find it.
    """
    return QuantizedConfig(GEARCodec(bits, group_size, buffer, outliers, rank, loops), buffer, "gear")
