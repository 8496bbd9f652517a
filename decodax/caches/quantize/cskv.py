"""CSKV: low-rank features of each token in place of its keys and values ("CSKV: Training-Efficient Channel Shrinking
for KV Cache in Long-Context Scenarios", Wang et al., 2024).

The projections to keys (before rotation) and values are factored, `W = A B`. The outputs of the narrow factor `A` are
cached, and `B` maps them back to keys and values. The latest tokens are stored exactly. The authors train the factors
layer by layer for the least squared error of keys and values on texts. Here this problem is solved in closed form: the
best `X A B` of rank `r` for keys `K = X W` is `K V V'` with the first `r` right singular vectors `V` of `K`. So `A = W
V`, `B = V'`, and the features of a token are its key times `V`. `decodax.train.fit_features` finds them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant, measured
from decodax.caches.quantize.codecs import Codec, Codes, Span, join_heads, split_heads
from decodax.caches.quantize.kivi import (
    Bits,
    KIVICodec,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.rotation import after_rotation, before_rotation
from decodax.common.options import Count
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class KVFeatures:
    """Orthonormal directions onto which keys and values are projected.

    Attributes:
        keys: `f32[L, G d, r]`.
        values: `f32[L, G e, r']`.
    """

    keys: Constant
    values: Constant


@dataclasses.dataclass(frozen=True)
class CSKVCodec(Codec):
    """Stores the features (projections) of keys and values, of all heads of a layer together.

    Attributes:
        features: the directions.
        bits: number of bits of a feature: 2, 4 or 8; None: not quantized.
        group_size: number of values that share a quantization step: of one feature of keys over tokens, or of a token's
            features of values.
    """

    features: KVFeatures
    bits: int | None = None
    group_size: int = 32

    needs_positions = True

    def __post_init__(self) -> None:
        if self.bits is not None:
            KIVICodec(self.bits, self.bits, self.group_size)

    @property
    def unit(self) -> int:
        return 1 if self.bits is None else self.group_size

    def check(self, shape: KVLayer) -> None:
        for name, basis, width in (("keys", self.features.keys, shape.heads * shape.width),
                                   ("values", self.features.values, shape.heads * (shape.both - shape.width))):
            if basis.value.ndim != 3 or basis.value.shape[1] != width:
                raise ValueError(f"features: got {name} {basis}, takes f32[L, {width}, r]")
            if self.bits is not None and basis.value.shape[2] * self.bits % 8:
                raise ValueError(f"features: got {basis.value.shape[2]} of {name}, takes a multiple of "
                                 f"{8 // self.bits} with {self.bits} bits")

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Array | Codes, Array | Codes]:
        assert span is not None
        keys = before_rotation(shape, kv[..., :shape.width], span.start)
        k, v = (join_heads(x) @ jnp.asarray(basis.value[span.layer], x.dtype) for x, basis in (
            (keys, self.features.keys), (kv[..., shape.width:], self.features.values)))
        if self.bits is None:
            return k[None], v[None]
        return (quantize_keys(k[None], self.bits, self.group_size),
                quantize_values(v[None], self.bits, self._group(v.shape[-1])))

    def decode(self, shape: KVLayer, codes: tuple[Any, Any], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        k, v = codes
        if self.bits is not None:
            k = dequantize_keys(k, self.bits, self.group_size, dtype)
            v = dequantize_values(v, self.bits, self._group(self.features.values.value.shape[2]), dtype)
        keys, values = (split_heads(x[0].astype(dtype) @ jnp.asarray(basis.value[span.layer], dtype).T, shape.heads)
                        for x, basis in ((k, self.features.keys), (v, self.features.values)))
        return jnp.concatenate([after_rotation(shape, keys, span.start), values], -1)

    def _group(self, width: int) -> int:
        return self.group_size if width % self.group_size == 0 else width


@CACHES.register("cskv", "CSKV: Training-Efficient Channel Shrinking for KV Cache in Long-Context Scenarios",
                 "Wang et al. 2024", family="quantize")
def cskv(features: KVFeatures | None = None, bits: Bits | None = None, group_size: Count = 32,
         residual_length: Count = 32) -> QuantizedConfig:
    """Keeps a few features of each token in place of its keys and values; the latest tokens are stored exactly.

    First fit the features of a model with `decodax.train.fit_features`; `bits` quantizes them, too.

    Args:
        features: the directions onto which keys and values are projected. Required.
        bits: number of bits of a feature. None: features are not quantized.
        group_size: number of values that share a scale, with `bits`.
        residual_length: number of tokens that are encoded together; the latest tokens are stored exactly until there
            are that many. With `bits`, a multiple of `group_size`.
    """
    codec = CSKVCodec(measured("features", features, KVFeatures, "fit_features"), bits, group_size)
    return QuantizedConfig(codec, residual_length, "cskv")
