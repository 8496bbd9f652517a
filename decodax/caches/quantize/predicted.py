"""Keys and values as what the layer before does not say of them ("Cache Me If You Must: Adaptive Key-Value Quantization
for Large Language Models", AQUA-KV: Shutova et al., 2025).

A linear map predicts the keys of a layer, before their rotation and all heads together, from those of the layer before,
and another one its values from its keys and the values of the layer before, all of them as they will be read again.
What is left over is spread by a Hadamard transform, divided by its norm, and written as the nearest points of a small
grid of pairs, 2 bits a number (HIGGS: Malinovskii et al., 2024). The first layer is written with a grid of 256 pairs.
The first tokens and the latest ones stay whole. `decodax.train.fit_predictors` finds the maps.

A layer can be read behind those before it alone. Here each layer reads all of them again, so the time of a round grows
with the square of the depth: this serves memory, not time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant
from decodax.caches.quantize.codecs import Codec, Span, pack, unpack
from decodax.caches.quantize.rotated import Sinks, hadamard
from decodax.caches.quantize.turning import after_rotation, apart, before_rotation, together
from decodax.core.cache import PyTree, ReadPrompt


@dataclasses.dataclass(frozen=True)
class Predictors:
    """What predicts layers, and the pairs that what is left over is written as.

    Attributes:
        keys: `f32[L, G d + 1, G d]`, maps with their biases in the last row; nothing is read of the first layer's.
        values: `f32[L, G d + G e + 1, G e]`. grid, first: `f32[N, 2]`, of all layers but the first one, and of that.
    """

    keys: Constant
    values: Constant
    grid: Constant
    first: Constant


def affine(x: Array, weights: Array) -> Array:
    """`f[n, c]` under a map `f[c + 1, c']` with its bias in the last row."""
    return x @ weights[:-1] + weights[-1]


def group_of(channels: int, most: int) -> int:
    """How many of so many channels are transformed together: the largest power of two that divides them, or `most`.

    >>> group_of(1024, 1024), group_of(96, 1024)
    (1024, 32)
    """
    return min(channels & -channels, most)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Numbers as the nearest pairs of a grid, behind a Hadamard transform of each `most` channels.

    Attributes:
        grid: `f32[N, 2]`, of 16 or 256 pairs or another power of two up to that.
    """

    grid: Constant
    most: int = 1024

    @property
    def bits(self) -> int:
        return (len(self.grid.value) - 1).bit_length()

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Of `f[n, c]`: pairs' numbers `u8[n, c / 2 * bits / 8]`, and the norms of groups, `f[n, c / g]`."""
        n, c = x.shape
        g = group_of(c, self.most)
        groups = x.astype(jnp.float32).reshape(n, -1, g)
        norms = jnp.linalg.norm(groups, axis=-1)
        # of norm sqrt(g), so that numbers are about as large as those of a standard normal distribution
        spread = groups @ jnp.asarray(hadamard(g)) * (g ** 0.5 / jnp.maximum(norms, 1e-30))[..., None]
        grid = jnp.asarray(self.grid.value)
        near = (2 * spread.reshape(n, -1, 2) @ grid.T - jnp.square(grid).sum(-1)).argmax(-1).astype(jnp.uint8)
        return (pack(near, self.bits) if self._packs(c) else near), norms.astype(x.dtype)

    def decode(self, codes: tuple[Array, Array], c: int, dtype: Any) -> Array:
        """What they stand for, `f[n, c]`."""
        numbers, norms = codes
        g = group_of(c, self.most)
        which = unpack(numbers, self.bits) if self._packs(c) else numbers
        pairs = jnp.asarray(self.grid.value)[which.astype(jnp.int32)].reshape(len(numbers), -1, g)
        pairs = pairs * (norms.astype(jnp.float32) / g ** 0.5)[..., None]
        return (pairs @ jnp.asarray(hadamard(g))).reshape(-1, c).astype(dtype)

    def _packs(self, c: int) -> bool:
        return self.bits in (1, 2, 4) and c // 2 * self.bits % 8 == 0


@dataclasses.dataclass(frozen=True)
class Predicted(Codec):
    """Few bits of what is left over.

    Attributes:
        predictors: what is predicted. group: channels that are transformed together at most.
        sinks: the first tokens of a prompt, which stay whole.
    """

    predictors: Predictors
    group: int = 1024
    sinks: int = 4

    places = True
    stacked = True

    def __post_init__(self) -> None:
        if self.group < 2 or self.group & (self.group - 1) or self.sinks < 0:
            raise ValueError(f"group, sinks: got {self.group} and {self.sinks}, takes a power of two from 2 on, and 0 "
                             "or more")

    @property
    def unit(self) -> int:
        return 1

    def check(self, shape: KVLayer) -> None:
        wide = shape.heads * shape.width, shape.heads * (shape.both - shape.width)
        for name, own, (inputs, outputs) in (("keys", self.predictors.keys, (wide[0], wide[0])),
                                             ("values", self.predictors.values, (sum(wide), wide[1]))):
            if own.value.ndim != 3 or own.value.shape[1:] != (inputs + 1, outputs):
                raise ValueError(f"predictors: got {name} {own}, takes f32[L, {inputs + 1}, {outputs}]")
        if any(n % 2 for n in wide):
            raise ValueError(f"width: got {wide[0]} channels of keys and {wide[1]} of values, takes an even number")

    def pairs(self, layer: int) -> Pairs:
        """How a layer is written."""
        return Pairs(self.predictors.grid if layer else self.predictors.first, self.group)

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> PyTree:
        assert span is not None
        keys = together(before_rotation(shape, kv[..., :shape.width], span.start))
        values, pairs = together(kv[..., shape.width:]), self.pairs(span.layer)
        guess = self._guess_keys(span)
        k = pairs.encode(keys if guess is None else keys - guess)
        again = pairs.decode(k, keys.shape[1], keys.dtype)
        guess_values = self._guess_values(again if guess is None else again + guess, span)
        v = pairs.encode(values if guess_values is None else values - guess_values)
        return jax.tree.map(lambda x: x[None], (k, v))      # all heads together

    def below(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span) -> tuple[Array, Array]:
        k, v = jax.tree.map(lambda x: x[0], codes)
        pairs = self.pairs(span.layer)
        keys = pairs.decode(k, shape.heads * shape.width, dtype)
        keys = keys if (guess := self._guess_keys(span)) is None else keys + guess
        values = pairs.decode(v, shape.heads * (shape.both - shape.width), dtype)
        return keys, values if (guess := self._guess_values(keys, span)) is None else values + guess

    def _guess_keys(self, span: Span) -> Array | None:
        if span.below is None:
            return None
        return affine(span.below[0], jnp.asarray(self.predictors.keys.value[span.layer], span.below[0].dtype))

    def _guess_values(self, keys: Array, span: Span) -> Array | None:
        if span.below is None:
            return None
        weights = jnp.asarray(self.predictors.values.value[span.layer], keys.dtype)
        return affine(jnp.concatenate([keys, span.below[1]], -1), weights)

    def decode(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        below = None
        for layer, own in enumerate(codes):
            below = self.below(shape, own, dtype, span.replace(layer=layer, below=below))
        assert below is not None
        keys, values = (apart(x, shape.heads) for x in below)
        whole = jnp.concatenate([after_rotation(shape, keys, span.start), values], -1)
        if not self.sinks:
            return whole
        at = span.study.at - span.start
        return whole.at[:, jnp.where((at >= 0) & (span.study.at >= 0), at, whole.shape[1])].set(
            span.study.kv.astype(dtype), mode="drop")

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[Sinks]:
        """The first tokens."""
        at = jnp.arange(self.sinks, dtype=jnp.int32)
        at = jnp.where(at < length[:, None], at, -1)
        return [Sinks(at=at, kv=jnp.pad(own[:, :, :self.sinks], (
            (0, 0), (0, 0), (0, max(self.sinks - own.shape[2], 0)), (0, 0)))) for own in kv]
