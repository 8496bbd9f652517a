"""KIVI: asymmetric quantization of keys by channel and of values by token ("KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache", Liu et al., 2024).

Some channels of keys are large in all tokens, so each channel has its own scale. KV-AdaQuant, GEAR, SQuat and QuantSpec
build on this quantization.

128 keys and values are quantized together; in the authors' code values are quantized one by one as they leave the
whole ones. Codes with 2, 4 and 8 bits are those of their `quant_and_pack_kcache` and `quant_and_pack_vcache`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.quantize.codecs import Codec, Codes, Span, pack, unpack
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.options import Count
from decodax.common.registry import CACHES

Bits = Literal[2, 4, 8]
"""Number of bits of a quantized number."""


def affine_codes(x: Array, bits: int, axis: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Quantizes `x` in groups along `axis`. Returns codes `u8` of the shape of `x`, and the steps and lows of the
    groups, without that axis."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    # one bit stands for the middles of both halves of the range: its ends would be too large (SpeCache)
    low, step = ((3 * low + high) / 4, (high - low) / 2) if bits == 1 else (low, (high - low) / (2**bits - 1))
    codes = jnp.round(jnp.clip((x - low) / jnp.where(step > 0, step, 1), 0, 2**bits - 1)).astype(jnp.uint8)
    return codes, step.squeeze(axis).astype(dtype), low.squeeze(axis).astype(dtype)


def quantize_keys(x: Array, bits: int, group_size: int) -> Codes:
    """Quantizes `f[G, S, d]` in groups of `group_size` tokens for each channel; steps are `f[G, S / group_size, d]`."""
    G, S, d = x.shape
    codes, steps, lows = affine_codes(x.reshape(G, -1, group_size, d), bits, 2, x.dtype)
    return Codes(codes=pack(codes.reshape(G, S, d), bits), steps=steps, lows=lows)


def quantize_values(x: Array, bits: int, group_size: int) -> Codes:
    """Quantizes `f[G, S, e]` in groups of `group_size` channels for each token; steps are `f[G, S, e / group_size]`."""
    G, S, e = x.shape
    codes, steps, lows = affine_codes(x.reshape(G, S, -1, group_size), bits, 3, x.dtype)
    return Codes(codes=pack(codes.reshape(G, S, e), bits), steps=steps, lows=lows)


def dequantize_keys(own: Codes, bits: int, group_size: int, dtype: Any) -> Array:
    """Inverts `quantize_keys`, up to the quantization error, and returns `f[G, S, d]`."""
    return _dequantize(own, bits, group_size, -2, dtype)


def dequantize_values(own: Codes, bits: int, group_size: int, dtype: Any) -> Array:
    """Inverts `quantize_values`, up to the quantization error, and returns `f[G, S, e]`."""
    return _dequantize(own, bits, group_size, -1, dtype)


def _dequantize(own: Codes, bits: int, group_size: int, axis: int, dtype: Any) -> Array:
    wide = lambda x: jnp.repeat(x, group_size, axis=axis)
    return unpack(own.codes, bits).astype(dtype) * wide(own.steps) + wide(own.lows)


def check_bits(**given: int) -> None:
    """Raises ValueError if a number of bits is not 2, 4 or 8."""
    for name, bits in given.items():
        if bits not in (2, 4, 8):
            raise ValueError(f"{name}: got {bits}, takes 2, 4 or 8")


@dataclasses.dataclass(frozen=True)
class KIVICodec(Codec):
    """Stores codes `round((x - low) / step)` with `step = (high - low) / (2^bits - 1)`, where a group ranges from `low`
    to `high`.

    A group of keys is one channel of `group_size` consecutive tokens. A group of values is `group_size` channels of one
    token, or all of them if the width is no multiple of `group_size`.

    Attributes:
        key_bits, value_bits: number of bits of a number: 2, 4 or 8.
        group_size: number of values that share a step.
    """

    key_bits: int = 2
    value_bits: int = 2
    group_size: int = 32

    def __post_init__(self) -> None:
        check_bits(key_bits=self.key_bits, value_bits=self.value_bits)
        if self.group_size < 1:
            raise ValueError(f"group_size: got {self.group_size}, takes 1 or more")

    @property
    def unit(self) -> int:
        return self.group_size

    def value_group(self, width: int) -> int:
        """Returns the number of channels of a value that share a step."""
        return self.group_size if width % self.group_size == 0 else width

    def check(self, shape: KVLayer) -> None:
        for name, width, bits in (("width", shape.width, self.key_bits),
                                  ("value_width", shape.both - shape.width, self.value_bits)):
            if width * bits % 8:
                raise ValueError(f"{name}: got heads of {width}, takes a multiple of {8 // bits} with {bits} bits")

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Codes, Codes]:
        keys, values = kv[..., :shape.width], kv[..., shape.width:]
        return (quantize_keys(keys, self.key_bits, self.group_size),
                quantize_values(values, self.value_bits, self.value_group(values.shape[-1])))

    def decode(self, shape: KVLayer, codes: tuple[Codes, Codes], dtype: Any,
               span: Span | None = None) -> Array:
        keys, values = codes
        return jnp.concatenate([
            dequantize_keys(keys, self.key_bits, self.group_size, dtype),
            dequantize_values(values, self.value_bits, self.value_group(shape.both - shape.width), dtype)], -1)


@dataclasses.dataclass(frozen=True)
class OneBitCodec(KIVICodec):
    """KIVI's groups with one bit, which is decoded as the lower or the upper quarter point of a group's range
    ("SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs", Jie et al., 2025)."""

    key_bits: int = 1
    value_bits: int = 1

    def __post_init__(self) -> None:
        if (self.key_bits, self.value_bits) != (1, 1) or self.group_size < 1:
            raise ValueError(f"key_bits, value_bits, group_size: got {self.key_bits}, {self.value_bits} and "
                             f"{self.group_size}, takes 1, 1 and 1 or more")


@CACHES.register("kivi", "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "Liu et al. 2024",
                 family="quantize")
def kivi(bits: Bits = 2, group_size: Count = 32, residual_length: Count = 128) -> QuantizedConfig:
    """Keeps all tokens in 2 bits, keys quantized by channel and values by token; the latest tokens are not quantized.

    Works with any model, and nothing has to be fitted; `caches.kivi(4)` is nearly lossless at a quarter of the size of
    16 bits.

    Args:
        bits: number of bits of each number.
        group_size: number of values that share a scale.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many. A multiple of `group_size`.
    """
    return QuantizedConfig(KIVICodec(bits, bits, group_size), residual_length, "kivi")
