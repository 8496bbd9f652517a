"""A few features of each token in place of its keys and values ("CSKV: Training-Efficient Channel Shrinking for KV
Cache in Long-Context Scenarios", Wang et al., 2024).

The projections of keys and values are factored, `W = A B`, into a narrow one whose outputs are kept and one that makes
keys and values of them; keys before their rotation. The latest tokens stay whole. The authors train the factors layer
by layer for the least squared error of keys and values on texts. That problem is solved in closed form: the best `X A
B` of rank `r` for keys `K = X W` is `K V V'` with the `r` first right singular vectors `V` of `K`, so `A = W V` and `B
= V'`, and a token's features are its key times `V`. `decodax.train.fit_features` finds them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant
from decodax.caches.quantize.codecs import Affine, Codec, Codes, Span, keys_of, of_keys, of_values, values_of
from decodax.caches.quantize.turning import after_rotation, apart, before_rotation, together


@dataclasses.dataclass(frozen=True)
class KVFeatures:
    """Directions that span a layer's keys, `f32[L, G d, r]`, and its values, `f32[L, G e, r']`, orthonormal."""

    keys: Constant
    values: Constant


@dataclasses.dataclass(frozen=True)
class Shrunk(Codec):
    """Features of the heads of a layer together.

    Attributes:
        features: the directions. bits: of a feature, 2, 4 or 8; None: they stay as they are. group: tokens of a
            feature of keys, or features of a token's values, that share a step.
    """

    features: KVFeatures
    bits: int | None = None
    group: int = 32

    places = True

    def __post_init__(self) -> None:
        if self.bits is not None:
            Affine(self.bits, self.bits, self.group)

    @property
    def unit(self) -> int:
        return 1 if self.bits is None else self.group

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
        k, v = (together(x) @ jnp.asarray(basis.value[span.layer], x.dtype) for x, basis in (
            (keys, self.features.keys), (kv[..., shape.width:], self.features.values)))
        if self.bits is None:
            return k[None], v[None]
        return of_keys(k[None], self.bits, self.group), of_values(v[None], self.bits, self._group(v.shape[-1]))

    def decode(self, shape: KVLayer, codes: tuple[Any, Any], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        k, v = codes
        if self.bits is not None:
            k = keys_of(k, self.bits, self.group, dtype)
            v = values_of(v, self.bits, self._group(self.features.values.value.shape[2]), dtype)
        keys, values = (apart(x[0].astype(dtype) @ jnp.asarray(basis.value[span.layer], dtype).T, shape.heads)
                        for x, basis in ((k, self.features.keys), (v, self.features.values)))
        return jnp.concatenate([after_rotation(shape, keys, span.start), values], -1)

    def _group(self, width: int) -> int:
        return self.group if width % self.group == 0 else width
