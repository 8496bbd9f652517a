"""SQuat: quantization of keys with errors nearly orthogonal to the queries ("SQuat: Subspace-orthogonal KV Cache
Quantization", Wang et al., 2025).

Most queries of a head are close to a subspace, that of the largest singular values of the prompt's queries. A key is
quantized a few channels at a time, and the remaining channels compensate the error, so that the products with queries
of the subspace change least.

Codes are those of the authors' code (ff91f13); values are quantized together with keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.quantize.codecs import Codec, Codes, Span, pack
from decodax.caches.quantize.kivi import (
    Bits,
    KIVICodec,
    affine_codes,
    dequantize_keys,
    dequantize_values,
    quantize_values,
)
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.rotation import after_rotation, before_rotation
from decodax.common.options import Count, NonNegative
from decodax.common.registry import CACHES
from decodax.core.cache import PyTree
from decodax.core.capabilities import ReadPrompt


@dataclasses.dataclass(frozen=True)
class SQuatCodec(Codec):
    """KIVI's codes for keys that are corrected during quantization.

    Let `Q = diag(s) V'` be the `subspace_dim` largest singular values `s` of the rotated queries of a head group in the
    prompt, with their right singular vectors. The loss of an error `e` of a key is `e' (I + squat_lambda Q'Q) e`. Given
    the errors of the channels that are quantized, the other channels are set to the values of least loss.

    Attributes:
        key_bits, value_bits: number of bits of a number: 2, 4 or 8.
        group_size: number of values that share a quantization step.
        quant_group_size: number of channels of a key that are quantized together.
        subspace_dim: dimension of the subspace.
        squat_lambda: weight of errors within the subspace.
        keys: whether keys are quantized "before" their rotation or "after" it; the authors' code has both.
    """

    key_bits: int = 2
    value_bits: int = 2
    group_size: int = 32
    quant_group_size: int = 64
    subspace_dim: int = 20
    squat_lambda: float = 0.001
    keys: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        KIVICodec(self.key_bits, self.value_bits, self.group_size)
        if self.quant_group_size < 1 or self.subspace_dim < 1 or self.squat_lambda < 0:
            raise ValueError(f"quant_group_size, subspace_dim, squat_lambda: got {self.quant_group_size}, "
                             f"{self.subspace_dim} and {self.squat_lambda}, takes 1 or more, and 0 or more")
        if self.keys not in ("before", "after"):
            raise ValueError(f"keys: got {self.keys!r}, takes before or after")

    @property
    def needs_positions(self) -> bool:       # type: ignore[override]
        return self.keys == "before"

    @property
    def unit(self) -> int:
        return self.group_size

    @property
    def _kivi(self) -> KIVICodec:
        return KIVICodec(self.key_bits, self.value_bits, self.group_size)

    def check(self, shape: KVLayer) -> None:
        self._kivi.check(shape)
        if shape.queries is None:
            raise ValueError("cache: squat takes a model that says how many query heads a layer has "
                             "(`KVLayer.queries`)")

    def start(self, shape: KVLayer, batch: int) -> Array:
        """Returns zeros for the sum of `q q'` over the queries of each head group, `f32[B, G, d, d]`, whose
        eigenvectors are the singular vectors of the queries."""
        return jnp.zeros((batch, shape.heads, shape.width, shape.width), jnp.float32)

    def gather(self, shape: KVLayer, gathered: Array, queries: Array, live: Array) -> Array:
        q = jnp.where(live[..., None, None], queries, 0).astype(jnp.float32)
        q = q.reshape(*q.shape[:2], shape.heads, -1, shape.width)
        return gathered + jnp.einsum("bwgri,bwgrj->bgij", q, q)

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[Array]:
        """Returns for each layer the matrix `M` of the quantization loss, `f32[B, G, d, d]`; see `weighing`."""
        return [self.weighing(own) for own in gathered]

    def weighing(self, products: Array) -> Array:
        """Returns the matrix `M` of the loss `e' M e` of an error `e` of a key: `I + squat_lambda Q'Q`, `f32[..., d,
        d]`.

        `Q` has the `subspace_dim` largest singular values and vectors of the prompt's queries `q`. They are the largest
        eigenvalues (square roots) and eigenvectors of `products`, the sum of `q q'`, `f32[..., d, d]`.
        """
        squares, vectors = jnp.linalg.eigh(products)        # the largest last
        vectors = vectors[..., -self.subspace_dim:]
        squares = jnp.maximum(squares[..., None, -self.subspace_dim:], 0)
        return jnp.eye(products.shape[-1]) + self.squat_lambda * (vectors * squares) @ vectors.swapaxes(-1, -2)

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Codes, Codes]:
        assert span is not None
        keys, values = kv[..., :shape.width], kv[..., shape.width:]
        if self.keys == "before":
            keys = before_rotation(shape, keys, span.start)
        return (self.quantize_keys(keys, span.study),
                quantize_values(values, self.value_bits, self._kivi.value_group(values.shape[-1])))

    def quantize_keys(self, keys: Array, weighing: Array) -> Codes:
        """Returns the codes of keys `f[G, n, d]`. `weighing` is the matrix of the loss, `f32[G, d, d]`."""
        (G, n, d), dtype = keys.shape, keys.dtype
        x = keys.astype(jnp.float32).reshape(G, -1, self.group_size, d)
        made = []
        for start in range(0, d, self.quant_group_size):
            stop = min(start + self.quant_group_size, d)
            codes, steps, lows = affine_codes(x[..., start:stop], self.key_bits, 2, dtype)
            made.append((codes.reshape(G, n, -1), steps, lows))
            error = codes * steps[:, :, None] + lows[:, :, None] - x[..., start:stop]
            # to where the loss is least, given the errors so far
            moves = jnp.linalg.solve(weighing[:, stop:, stop:], weighing[:, stop:, start:stop])
            x = x.at[..., stop:].add(-jnp.einsum("gatc,grc->gatr", error, moves))
        codes, steps, lows = (jnp.concatenate(part, -1) for part in zip(*made, strict=True))
        return Codes(codes=pack(codes, self.key_bits), steps=steps, lows=lows)

    def decode(self, shape: KVLayer, codes: tuple[Codes, Codes], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        keys = dequantize_keys(codes[0], self.key_bits, self.group_size, dtype)
        if self.keys == "before":
            keys = after_rotation(shape, keys, span.start)
        width = shape.both - shape.width
        values = dequantize_values(codes[1], self.value_bits, self._kivi.value_group(width), dtype)
        return jnp.concatenate([keys, values], -1)


@CACHES.register("squat", "SQuat: Subspace-orthogonal KV Cache Quantization", "Wang et al. 2025", family="quantize")
def squat(bits: Bits = 2, group_size: Count = 32, residual_length: Count = 32, quant_group_size: Count = 64,
          subspace_dim: Count = 20, squat_lambda: NonNegative = 0.001,
          keys: Literal["before", "after"] = "before") -> QuantizedConfig:
    """Keeps all tokens in 2 bits, with errors of keys nearly orthogonal to the prompt's queries; the latest tokens are
    not quantized.

    More accurate than `kivi` at the same bits. Nothing has to be fitted beforehand, since it uses the prompt's queries.

    Args:
        bits: number of bits of each number.
        group_size: number of values that share a scale.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many. A multiple of `group_size`.
        quant_group_size: number of channels of a key that are quantized together; the next ones compensate their error.
        subspace_dim: dimension of the subspace of queries.
        squat_lambda: weight of errors within the subspace.
        keys: whether keys are quantized before or after their rotation.
    """
    codec = SQuatCodec(bits, bits, group_size, quant_group_size, subspace_dim, squat_lambda, keys)
    return QuantizedConfig(codec, residual_length, "squat")
