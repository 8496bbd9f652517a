"""CQ: coupled quantization encodes several channels together as the index of the nearest centroid ("KV Cache is 1 Bit
Per Channel: Efficient Large Language Model Inference with Coupled Quantization", Zhang et al., 2024).

Channels of a key or a value depend on one another, so encoding several of them together takes fewer bits than encoding
each alone. Keys are encoded before rotation. `decodax.train.fit_codebooks` finds the centroids.

No code is public. Tokens are weighted by gradients of the loss on the next token (`fisher` of `fit_codebooks`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant, measured
from decodax.caches.quantize.codecs import Codec, Span, pack, packs, unpack
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.rotation import after_rotation, before_rotation
from decodax.common.options import Count
from decodax.common.registry import CACHES

PART = 256
"""Number of tokens whose distances to all centroids are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Codebooks:
    """Centroids for each group of `c` channels.

    Attributes:
        keys: `f32[L, G, d / c, 2^bits, c]`, centroids of keys before rotation.
        values: `f32[L, G, e / c, 2^bits, c]`, centroids of values.
    """

    keys: Constant
    values: Constant

    @property
    def bits(self) -> int:
        """Number of bits of a group of channels."""
        return int(self.keys.value.shape[3] - 1).bit_length()


def nearest(x: Array, centroids: Array) -> Array:
    """Returns the index of the nearest centroid of each group of `c` channels, `i32[G, n, d / c]`.

    Args:
        x: `f[G, n, d]`.
        centroids: `f[G, d / c, K, c]`.
    """
    G, n, d = x.shape
    squares = jnp.square(centroids).sum(-1)

    def one(part: Array) -> Array:
        groups = part.reshape(G, -1, centroids.shape[1], centroids.shape[3]).astype(jnp.float32)
        return jnp.argmin(squares[:, None] - 2 * jnp.einsum("gnmc,gmkc->gnmk", groups, centroids), -1).astype(jnp.int32)

    if n % PART or n == PART:
        return one(x)
    found = lax.map(one, x.reshape(G, -1, PART, d).swapaxes(0, 1))
    return found.swapaxes(0, 1).reshape(G, n, -1)


@dataclasses.dataclass(frozen=True)
class CQCodec(Codec):
    """Stores the index of the nearest centroid for each group of channels.

    Attributes:
        books: the centroids.
    """

    books: Codebooks

    needs_positions = True

    def check(self, shape: KVLayer) -> None:
        for name, book, width in (("keys", self.books.keys, shape.width),
                                  ("values", self.books.values, shape.both - shape.width)):
            if book.value.ndim != 5:
                raise ValueError(f"codebooks: got {name} {book}, takes f32[L, G, d / c, 2^bits, c]")
            _, G, groups, _, c = book.value.shape
            if (G, groups * c) != (shape.heads, width):
                raise ValueError(f"codebooks: got {name} of {G} heads of {groups * c}, the model has {shape.heads} of "
                                 f"{width}")

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Array, Array]:
        assert span is not None
        keys = before_rotation(shape, kv[..., :shape.width], span.start)
        return tuple(self._packed(nearest(x, jnp.asarray(book.value[span.layer]))) for x, book in (
            (keys, self.books.keys), (kv[..., shape.width:], self.books.values)))       # type: ignore[return-value]

    def decode(self, shape: KVLayer, codes: tuple[Array, Array], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        keys, values = (self._of(x, book, span.layer).astype(dtype) for x, book in
                        zip(codes, (self.books.keys, self.books.values), strict=True))
        return jnp.concatenate([after_rotation(shape, keys, span.start), values], -1)

    def _packed(self, codes: Array) -> Array:
        if packs(codes.shape[-1], self.books.bits):
            return pack(codes.astype(jnp.uint8), self.books.bits)
        return codes.astype(jnp.uint8 if self.books.bits <= 8 else jnp.uint16)

    def _of(self, codes: Array, book: Constant, layer: int) -> Array:
        centroids = jnp.asarray(book.value[layer])              # [G, m, K, c]
        packed = packs(centroids.shape[1], self.books.bits)
        which = (unpack(codes, self.books.bits) if packed else codes).astype(jnp.int32)
        G, n, m = which.shape
        at = jnp.arange(G)[:, None, None], jnp.arange(m)[None, None], which
        return centroids[at].reshape(G, n, -1)


@CACHES.register("cq",
                 "KV Cache is 1 Bit Per Channel: Efficient Large Language Model Inference with Coupled Quantization",
                 "Zhang et al. 2024", family="quantize")
def cq(codebooks: Codebooks | None = None, residual_length: Count = 32) -> QuantizedConfig:
    """Keeps all tokens as indices of the nearest centroids of coupled channels; the latest tokens are not quantized.

    Needs as little as one bit per channel. First fit the centroids of a model with `decodax.train.fit_codebooks`.

    Args:
        codebooks: the centroids. Required.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many.
    """
    return QuantizedConfig(CQCodec(measured("codebooks", codebooks, Codebooks, "fit_codebooks")), residual_length, "cq")
