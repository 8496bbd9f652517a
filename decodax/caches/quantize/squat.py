"""Keys whose errors lie across what queries look at ("SQuat: Subspace-orthogonal KV Cache Quantization", Wang et al.,
2025).

A few directions carry most of what a head's queries are: those of the largest singular values of the prompt's queries.
A key is quantised some channels at a time, and the error of those is made up for in the channels that follow, so that
what is left of it changes the products with such queries least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.quantize.codecs import Affine, Codec, Codes, Span, keys_of, of_values, pack, quantized, values_of
from decodax.caches.quantize.turning import after_rotation, before_rotation
from decodax.core.cache import PyTree, ReadPrompt


@dataclasses.dataclass(frozen=True)
class SubspaceOrthogonal(Codec):
    """Codes as `Affine` has them, of keys that are corrected on the way.

    With `Q = diag(s) V'` of the `rank` largest singular values `s` of a group's queries, rotated, over the whole
    prompt, errors `e` of a key weigh `e' (I + strength Q'Q) e`. Given those of the channels that are quantised, the
    others are moved to where that is least.

    Attributes:
        key_bits, value_bits: 2, 4 or 8. group: numbers that share a step. channels: of a key, quantised together.
        rank: of the subspace. strength: `lambda` of the paper.
        keys: quantised "before" their rotation or "after" it; the authors' code has both.
    """

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32
    channels: int = 64
    rank: int = 20
    strength: float = 0.001
    keys: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        Affine(self.key_bits, self.value_bits, self.group)
        if self.channels < 1 or self.rank < 1 or self.strength < 0:
            raise ValueError(f"channels, rank, strength: got {self.channels}, {self.rank} and {self.strength}, takes 1 "
                             "or more, and 0 or more")
        if self.keys not in ("before", "after"):
            raise ValueError(f"keys: got {self.keys!r}, takes before or after")

    @property
    def places(self) -> bool:       # type: ignore[override]
        return self.keys == "before"

    @property
    def unit(self) -> int:
        return self.group

    @property
    def _affine(self) -> Affine:
        return Affine(self.key_bits, self.value_bits, self.group)

    def check(self, shape: KVLayer) -> None:
        self._affine.check(shape)
        if shape.queries is None:
            raise ValueError("cache: squat takes a model that says how many query heads a layer has")

    def start(self, shape: KVLayer, batch: int) -> Array:
        """`f32[B, G, d, d]`: the sum of `q q'` over a group's queries, whose eigenvectors are their singular ones."""
        return jnp.zeros((batch, shape.heads, shape.width, shape.width), jnp.float32)

    def gather(self, shape: KVLayer, gathered: Array, queries: Array, live: Array) -> Array:
        q = jnp.where(live[..., None, None], queries, 0).astype(jnp.float32)
        q = q.reshape(*q.shape[:2], shape.heads, -1, shape.width)
        return gathered + jnp.einsum("bwgri,bwgrj->bgij", q, q)

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[Array]:
        """How errors of a key weigh, `f32[B, G, d, d]` of each layer."""
        return [self.weighing(own) for own in gathered]

    def weighing(self, products: Array) -> Array:
        """`I + strength Q'Q` of `f32[..., d, d]` sums of products of queries."""
        squares, vectors = jnp.linalg.eigh(products)        # the largest last
        vectors = vectors[..., -self.rank:]
        squares = jnp.maximum(squares[..., None, -self.rank:], 0)
        return jnp.eye(products.shape[-1]) + self.strength * (vectors * squares) @ vectors.swapaxes(-1, -2)

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Codes, Codes]:
        assert span is not None
        keys, values = kv[..., :shape.width], kv[..., shape.width:]
        if self.keys == "before":
            keys = before_rotation(shape, keys, span.start)
        return (self.of_keys(keys, span.study),
                of_values(values, self.value_bits, self._affine.group_of(values.shape[-1])))

    def of_keys(self, keys: Array, weighing: Array) -> Codes:
        """The codes of `f[G, n, d]`; `weighing`: `f32[G, d, d]`."""
        (G, n, d), dtype = keys.shape, keys.dtype
        x = keys.astype(jnp.float32).reshape(G, -1, self.group, d)
        made = []
        for start in range(0, d, self.channels):
            stop = min(start + self.channels, d)
            codes, steps, lows = quantized(x[..., start:stop], self.key_bits, 2, dtype)
            made.append((codes.reshape(G, n, -1), steps, lows))
            error = codes * steps[:, :, None] + lows[:, :, None] - x[..., start:stop]
            # to where the weight of all errors is least, given those so far
            moves = jnp.linalg.solve(weighing[:, stop:, stop:], weighing[:, stop:, start:stop])
            x = x.at[..., stop:].add(-jnp.einsum("gatc,grc->gatr", error, moves))
        codes, steps, lows = (jnp.concatenate(part, -1) for part in zip(*made, strict=True))
        return Codes(codes=pack(codes, self.key_bits), steps=steps, lows=lows)

    def decode(self, shape: KVLayer, codes: tuple[Codes, Codes], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        keys = keys_of(codes[0], self.key_bits, self.group, dtype)
        if self.keys == "before":
            keys = after_rotation(shape, keys, span.start)
        width = shape.both - shape.width
        return jnp.concatenate([keys, values_of(codes[1], self.value_bits, self._affine.group_of(width), dtype)], -1)
