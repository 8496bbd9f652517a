"""AQUA-KV: residual quantization against a linear prediction from the previous layer ("Cache Me If You Must: Adaptive
Key-Value Quantization for Large Language Models", Shutova et al., 2025).

A linear map predicts the keys of a layer (before rotation, all heads together) from those of the previous layer.
Another one predicts its values from its keys and the values of the previous layer. The inputs of both maps are decoded
keys and values. The residual is transformed (Hadamard), divided by its norm, and quantized to the nearest points of a
small grid of pairs, 2 bits per number (HIGGS: Malinovskii et al., 2024). The first layer is quantized with a grid of
256 pairs. The first tokens and the latest ones are not quantized. `decodax.train.fit_predictors` fits the maps.

A layer can only be decoded after the layers below it. Each layer decodes all of them again, so the time of a round
grows with the square of the depth: this saves memory, not time.

Maps and codes are those of the authors' code (e744183) except for half precision. The tables of `fit_predictors` have
0.2 and 4 percent more squared error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant, measured
from decodax.caches.quantize.codecs import Codec, Span, WholeTokens, join_heads, pack, packs, split_heads, unpack
from decodax.caches.quantize.hadamard import hadamard
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.rotation import after_rotation, before_rotation
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.core.cache import PyTree
from decodax.core.capabilities import ReadPrompt


@dataclasses.dataclass(frozen=True)
class Predictors:
    """Linear maps that predict the keys and values of each layer, and the grids of pairs to which the errors are
    quantized.

    Attributes:
        keys: `f32[L, G d + 1, G d]`, maps from the keys of the previous layer to those of each layer, with biases in
            the last row. The map of the first layer is not used.
        values: `f32[L, G d + G e + 1, G e]`, maps from the keys of the layer and the values of the previous one to its
            values, in the same form.
        grid: `f32[N, 2]`, the `N` points to which pairs of numbers are quantized in all layers but the first.
        first: `f32[N, 2]`, those for the first layer.
    """

    keys: Constant
    values: Constant
    grid: Constant
    first: Constant


def affine(x: Any, weights: Any) -> Any:
    """Applies the linear map `weights`, `f[c + 1, c']` with the bias in the last row, to `x`, `f[n, c]`."""
    return x @ weights[:-1] + weights[-1]


def transform_size(channels: int, most: int) -> int:
    """Returns the number of channels that are transformed together: the largest power of two that divides `channels`,
    at most `most`.

    >>> transform_size(1024, 1024), transform_size(96, 1024)
    (1024, 32)
    """
    return min(channels & -channels, most)


@dataclasses.dataclass(frozen=True)
class HIGGS:
    """Quantizes pairs of numbers to the nearest points of a grid, after a Hadamard transform.

    Attributes:
        grid: `f32[N, 2]`, the `N` points; `N` is a power of two up to 256.
        most: maximum number of channels that are transformed together.
    """

    grid: Constant
    most: int = 1024

    @property
    def bits(self) -> int:
        return (len(self.grid.value) - 1).bit_length()

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Quantizes vectors `x`, `f[n, c]`.

        Returns:
            The index of the nearest grid point for each pair of channels, packed to `u8[n, c / 2 * bits / 8]` where
            they fill whole bytes, else `u8[n, c / 2]`; and the norm of each group of `g` transformed channels, `f[n, c
            / g]`.
        """
        n, c = x.shape
        g = transform_size(c, self.most)
        groups = x.astype(jnp.float32).reshape(n, -1, g)
        norms = jnp.linalg.norm(groups, axis=-1)
        # of norm sqrt(g), so that numbers are about as large as those of a standard normal distribution
        spread = groups @ jnp.asarray(hadamard(g)) * (g ** 0.5 / jnp.maximum(norms, 1e-30))[..., None]
        grid = jnp.asarray(self.grid.value)
        near = (2 * spread.reshape(n, -1, 2) @ grid.T - jnp.square(grid).sum(-1)).argmax(-1).astype(jnp.uint8)
        return (pack(near, self.bits) if packs(c // 2, self.bits) else near), norms.astype(x.dtype)

    def decode(self, codes: tuple[Array, Array], c: int, dtype: Any) -> Array:
        """Inverts `encode`, up to the quantization error, and returns `f[n, c]`."""
        numbers, norms = codes
        g = transform_size(c, self.most)
        which = unpack(numbers, self.bits) if packs(c // 2, self.bits) else numbers
        pairs = jnp.asarray(self.grid.value)[which.astype(jnp.int32)].reshape(len(numbers), -1, g)
        pairs = pairs * (norms.astype(jnp.float32) / g ** 0.5)[..., None]
        return (pairs @ jnp.asarray(hadamard(g))).reshape(-1, c).astype(dtype)


@dataclasses.dataclass(frozen=True)
class AQUAKVCodec(Codec):
    """Stores keys and values as the quantized error of a linear prediction from the previous layer (AQUA-KV).

    Attributes:
        predictors: the linear maps that predict, and the grids of quantized values.
        group_size: maximum number of channels in one Hadamard transform before quantization; a power of two.
        sinks: number of first tokens that are stored unquantized.
    """

    predictors: Predictors
    group_size: int = 1024
    sinks: int = 4

    needs_positions = True
    stacked = True

    def __post_init__(self) -> None:
        if self.group_size < 2 or self.group_size & (self.group_size - 1) or self.sinks < 0:
            raise ValueError(f"group_size, sinks: got {self.group_size} and {self.sinks}, takes a power of two from 2 "
                             "on, and 0 or more")

    def check(self, shape: KVLayer) -> None:
        wide = shape.heads * shape.width, shape.heads * (shape.both - shape.width)
        for name, own, (inputs, outputs) in (("keys", self.predictors.keys, (wide[0], wide[0])),
                                             ("values", self.predictors.values, (sum(wide), wide[1]))):
            if own.value.ndim != 3 or own.value.shape[1:] != (inputs + 1, outputs):
                raise ValueError(f"predictors: got {name} {own}, takes f32[L, {inputs + 1}, {outputs}]")
        if any(n % 2 for n in wide):
            raise ValueError(f"width: got {wide[0]} channels of keys and {wide[1]} of values, takes an even number")

    def quantizer(self, layer: int) -> HIGGS:
        """Returns the quantizer of a layer's residuals."""
        return HIGGS(self.predictors.grid if layer else self.predictors.first, self.group_size)

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> PyTree:
        assert span is not None
        keys = join_heads(before_rotation(shape, kv[..., :shape.width], span.start))
        values, pairs = join_heads(kv[..., shape.width:]), self.quantizer(span.layer)
        guess = self._guess_keys(span)
        k = pairs.encode(keys if guess is None else keys - guess)
        again = pairs.decode(k, keys.shape[1], keys.dtype)
        guess_values = self._guess_values(again if guess is None else again + guess, span)
        v = pairs.encode(values if guess_values is None else values - guess_values)
        return jax.tree.map(lambda x: x[None], (k, v))      # all heads together

    def below(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span) -> tuple[Array, Array]:
        k, v = jax.tree.map(lambda x: x[0], codes)
        pairs = self.quantizer(span.layer)
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
        keys, values = (split_heads(x, shape.heads) for x in below)
        whole = jnp.concatenate([after_rotation(shape, keys, span.start), values], -1)
        return span.study.put(whole, span.start) if self.sinks else whole

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[WholeTokens]:
        return [WholeTokens.first(own, length, self.sinks) for own in kv]


@CACHES.register("aqua-kv", "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models",
                 "Shutova et al. 2025", family="quantize")
def aqua_kv(predictors: Predictors | None = None, group_size: Count = 1024, sinks: Whole = 4,
            residual_length: Count = 128) -> QuantizedConfig:
    """Keeps all tokens as residuals of a linear prediction from the previous layer in 2 bits; the first and the latest
    tokens are not quantized.

    Accurate at 2 bits, but slow for deep models. First fit the maps with `decodax.train.fit_predictors`.

    Args:
        predictors: maps and grids. Required.
        group_size: maximum number of channels that are transformed together, a power of two from 2.
        sinks: number of first tokens that are not quantized.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many.
    """
    predictors = measured("predictors", predictors, Predictors, "fit_predictors")
    return QuantizedConfig(AQUAKVCodec(predictors, group_size, sinks), residual_length, "aqua-kv")
