"""QuantSpec's codec: codes of 8 bits, of which drafts use the upper 4 ("QuantSpec: Self-Speculative Decoding with
Hierarchical Quantized KV Cache", Tiwari et al., 2025). The algorithm `quantspec` uses it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.quantize.codecs import Codec, Codes, Span, pack, unpack
from decodax.caches.quantize.kivi import KIVICodec


@dataclasses.dataclass(frozen=True)
class QuantSpecCodec(Codec):
    """Stores KIVI's codes in 4 bits, and 4 more bits for the quantization error.

    A number is decoded as `low + step * upper` for drafts and as `low + step * (upper + lower / 16)` for the target
    model, with `lower` from -8 to 7.

    Attributes:
        group_size: number of values that share a quantization step.
        lower: True to decode both halves, False for the upper half only.
    """

    group_size: int = 128
    lower: bool = True

    @property
    def unit(self) -> int:
        return self.group_size

    @property
    def _upper(self) -> KIVICodec:
        return KIVICodec(4, 4, self.group_size)

    def check(self, shape: KVLayer) -> None:
        self._upper.check(shape)

    def for_drafts(self) -> Codec:
        return dataclasses.replace(self, lower=False)

    def encode(self, shape: KVLayer, kv: Array,
               span: Span | None = None) -> tuple[tuple[Codes, Codes], tuple[Array, Array]]:
        upper = self._upper.encode(shape, kv)
        error = kv - self._upper.decode(shape, upper, kv.dtype)
        steps = self._steps(shape, upper)
        lower = jnp.clip(jnp.round(error / jnp.where(steps > 0, steps, 1) * 16), -8, 7) + 8
        keys, values = jnp.split(lower.astype(jnp.uint8), [shape.width], -1)
        return upper, (pack(keys, 4), pack(values, 4))

    def decode(self, shape: KVLayer, codes: tuple[tuple[Codes, Codes], tuple[Array, Array]], dtype: Any,
               span: Span | None = None) -> Array:
        upper, lower = codes
        coarse = self._upper.decode(shape, upper, dtype)
        if not self.lower:
            return coarse
        fine = jnp.concatenate([unpack(x, 4) for x in lower], -1).astype(dtype)
        return coarse + self._steps(shape, upper) * (fine - 8) / 16

    def _steps(self, shape: KVLayer, upper: tuple[Codes, Codes]) -> Array:
        keys, values = upper
        return jnp.concatenate([jnp.repeat(keys.steps, self.group_size, -2),
                                jnp.repeat(values.steps, self._upper.value_group(shape.both - shape.width), -1)], -1)
