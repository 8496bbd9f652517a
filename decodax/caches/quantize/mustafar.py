"""Mustafar: unstructured pruning of keys and values by magnitude ("Mustafar: Promoting Unstructured Sparsity for KV
Cache Pruning in LLM Inference", Joo et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.quantize.codecs import Codec, Span, pack, unpack
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.options import Count, Range
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, struct

Sparsity = Annotated[float, Range(0, 1, below=True)]
"""Share of numbers that are dropped."""


@struct
class SparseTokens(Struct):
    """The largest numbers of each token's key or value, without those that are dropped.

    Attributes:
        kept: `f[G, n, k]`, the `k` kept numbers of each of `n` tokens, in the order of their channels.
        which: `u8[G, n, d / 8]`, a bitmap of their channels.
    """

    kept: Array
    which: Array


@dataclasses.dataclass(frozen=True)
class MustafarCodec(Codec):
    """Stores the numbers of largest magnitude of each token's key and value; the others are decoded as 0.

    As in the authors' code, the numbers from the `int(sparsity * d)`-th smallest on are kept.

    Attributes:
        key_sparsity, value_sparsity: shares of numbers that are dropped.
    """

    key_sparsity: float = 0.5
    value_sparsity: float = 0.5

    def __post_init__(self) -> None:
        for name in ("key_sparsity", "value_sparsity"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 0 to 1, without 1")

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[SparseTokens, SparseTokens]:
        return (self._encode(kv[..., :shape.width], self.key_sparsity),
                self._encode(kv[..., shape.width:], self.value_sparsity))

    def decode(self, shape: KVLayer, codes: tuple[SparseTokens, SparseTokens], dtype: Any,
               span: Span | None = None) -> Array:
        widths = shape.width, shape.both - shape.width
        return jnp.concatenate([self._decode(own, d, dtype) for own, d in zip(codes, widths, strict=True)], -1)

    def _encode(self, x: Array, sparsity: float) -> SparseTokens:
        d = x.shape[-1]
        count = d - max(1, int(sparsity * d)) + 1
        at = jnp.sort(jnp.argsort(jnp.abs(x), axis=-1)[..., d - count:], axis=-1)
        marks = jnp.put_along_axis(jnp.zeros(x.shape, jnp.uint8), at, jnp.uint8(1), -1, inplace=False)
        marks = jnp.pad(marks, ((0, 0), (0, 0), (0, -d % 8)))
        return SparseTokens(kept=jnp.take_along_axis(x, at, -1), which=pack(marks, 1))

    def _decode(self, own: SparseTokens, d: int, dtype: Any) -> Array:
        marks = unpack(own.which, 1)[..., :d].astype(jnp.int32)
        rank = jnp.maximum(jnp.cumsum(marks, -1) - 1, 0)
        return jnp.where(marks > 0, jnp.take_along_axis(own.kept, rank, -1), 0).astype(dtype)


@CACHES.register("mustafar", "Mustafar: Promoting Unstructured Sparsity for KV Cache Pruning in LLM Inference",
                 "Joo et al. 2025", family="quantize")
def mustafar(key_sparsity: Sparsity = 0.5, value_sparsity: Sparsity = 0.5,
             residual_length: Count = 32) -> QuantizedConfig:
    """Keeps the numbers of largest magnitude of each token's key and value; the latest tokens are stored exactly.

    Nothing has to be fitted. A bitmap marks the kept numbers, so at sparsity 0.5 it takes about 0.56 of the size of 16
    bits.

    Args:
        key_sparsity, value_sparsity: share of the numbers of a key and of a value that are dropped.
        residual_length: number of tokens that are pruned together; the latest tokens are stored exactly until there are
            that many.
    """
    return QuantizedConfig(MustafarCodec(key_sparsity, value_sparsity), residual_length, "mustafar")
