"""A codec of 4 bits a number: a sign and the logarithm of the magnitude, in octaves below the largest one of a token's
key or value. The largest error is 42% of a number, or a ninetieth of the largest one of its token."""

import dataclasses

import jax.numpy as jnp
from jax import Array

import decodax as dx
from decodax.caches.quantize.codecs import Codec
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.options import Count
from decodax.common.struct import Struct, struct


@struct
class Octaves(Struct):
    """`codes` `u8[G, n, (d + e) / 2]`, two numbers a byte; `largest` `f32[G, n, 2]`, of keys and of values."""

    codes: Array
    largest: Array


@dataclasses.dataclass(frozen=True)
class LogScale(Codec):
    """Codes 0 to 6 are octaves below the largest magnitude, 7 is zero, and 8 is the sign."""

    def check(self, shape):
        if shape.width % 2:
            raise ValueError(f"cache: got keys of width {shape.width}, log-scale takes an even width")

    def encode(self, shape, kv, span=None):
        kv = kv.astype(jnp.float32)
        parts = kv[..., :shape.width], kv[..., shape.width:]
        largest = jnp.stack([jnp.maximum(jnp.abs(x).max(-1), 1e-30) for x in parts], -1)
        share = jnp.concatenate([x / largest[..., i, None] for i, x in enumerate(parts)], -1)
        octave = jnp.clip(jnp.round(-jnp.log2(jnp.maximum(jnp.abs(share), 1e-9))), 0, 7)
        codes = octave.astype(jnp.uint8) + 8 * (share < 0).astype(jnp.uint8)
        return Octaves(codes=codes[..., ::2] + 16 * codes[..., 1::2], largest=largest)

    def decode(self, shape, codes, dtype, span=None):
        code = jnp.stack([codes.codes % 16, codes.codes // 16], -1).reshape(*codes.codes.shape[:-1], -1)
        size = jnp.where(code % 8 == 7, 0, 2.0 ** -(code % 8).astype(jnp.float32))
        of_keys = jnp.arange(code.shape[-1]) < shape.width
        largest = jnp.where(of_keys, codes.largest[..., :1], codes.largest[..., 1:])
        return (jnp.where(code >= 8, -size, size) * largest).astype(dtype)


@dx.caches.register("log-scale", "An experiment", "decodax", family="quantize")
def log_scale(residual_length: Count = 32) -> QuantizedConfig:
    """Keeps a sign and an octave of each number, and the latest tokens whole."""
    return QuantizedConfig(LogScale(), residual_length, "log-scale")
