"""RotateKV: 2-bit quantization after a Walsh-Hadamard transform ("RotateKV: Accurate and Robust 2-Bit KV Cache
Quantization for LLMs via Outlier-Aware Adaptive Rotations", Su et al., 2025).

The transform spreads the large channels of keys, before their rotary embedding, over the channels of several heads.
Then channels are reordered by their sums on texts, so that channels that share a step are similar. Values are
transformed head by head. The tokens of massive activations, which act as attention sinks, are not quantized.

Numbers are those of the authors' code (3055e2b). The inputs of each layer are found by prefilling the prompt once
more (`sinks=0`: not); values are transformed when they are read; new tokens are quantized 32 at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import unpadded
from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant, measured
from decodax.caches.quantize.codecs import Codec, Codes, Span, WholeTokens, join_heads, pack, split_heads, unpack
from decodax.caches.quantize.hadamard import hadamard, transformed
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.rotation import after_rotation, before_rotation
from decodax.caches.shapes import layers_of
from decodax.common.options import Count, Range, Whole
from decodax.common.registry import CACHES
from decodax.core.cache import PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.core.types import LayeredModel
from decodax.core.window import causal

CHUNK = 256
"""Number of prompt tokens whose activations are computed at a time."""


@dataclasses.dataclass(frozen=True)
class RotateKVCodec(Codec):
    """Stores quantized transformed channels of each token.

    Let a group of channels range from `low` to `high`. With `step = clip (high - low) / (2^bits - 1)` and `zero =
    round(-clip low / step)`, a code is `round(x / step) + zero`. The authors' code has `bits^2 - 1` levels, which is
    the same for 2 and 4 bits.

    Attributes:
        order: `i32[L, G d]`, a permutation of the transformed channels (`decodax.train.fit_order`).
        bits: number of bits of a number: 2 or 4.
        group_size: number of channels of a head that share a step.
        clip: share of a group's range that is covered.
        heads: number of heads that are transformed together.
        sinks: number of largest activations at the input of a layer, in a prompt; their tokens are not quantized.
    """

    order: Constant
    bits: int = 2
    group_size: int = 128
    clip: float = 0.8
    heads: int = 4
    sinks: int = 20

    needs_positions = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits: got {self.bits}, takes 2 or 4")
        if self.group_size < 1 or self.heads < 1 or self.sinks < 0 or not 0 < self.clip <= 1:
            raise ValueError(f"group_size, heads, sinks, clip: got {self.group_size}, {self.heads}, {self.sinks} and "
                             f"{self.clip}, takes 1 or more, 1 or more, 0 or more, and more than 0 up to 1")

    def wide(self, shape: KVLayer) -> int:
        """Returns the number of channels that are transformed together."""
        return math.gcd(self.heads, shape.heads) * shape.width

    def check(self, shape: KVLayer) -> None:
        values = shape.both - shape.width
        for name, width in (("heads", self.wide(shape)), ("value_width", values)):
            if width & (width - 1):
                raise ValueError(f"{name}: got {width} channels that are transformed together, takes a power of two")
        if self.order.value.ndim != 2 or self.order.value.shape[1] != shape.heads * shape.width:
            raise ValueError(f"order: got {self.order}, takes i32[L, {shape.heads * shape.width}]")
        if shape.width * self.bits % 8 or values * self.bits % 8:
            raise ValueError(f"width: got heads of {shape.width} and {values}, takes a multiple of {8 // self.bits} "
                             f"with {self.bits} bits")

    def check_model(self, model: Any) -> None:
        if self.sinks and (not isinstance(model, LayeredModel) or model.depth != len(layers_of(model))):
            raise ValueError("cache: rotatekv looks at what enters each layer, so it takes a model whose layers can be "
                             "run one by one; sinks=0 takes any")

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[WholeTokens]:
        """Finds the tokens with the largest activations at the input of each layer. Runs the model on the prompt once
        more."""
        B = length.shape[0]
        at = jnp.full((len(shapes), B, self.sinks), -1, jnp.int32)
        if prompt is not None and self.sinks:
            at = self._massive(shapes, kv, length, prompt)
        take = jax.vmap(lambda kv, at: kv[:, jnp.maximum(at, 0)])
        return [WholeTokens(at=own, kv=take(whole, own)) for own, whole in zip(at, kv, strict=True)]

    def _massive(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, prompt: ReadPrompt) -> Array:
        """Returns the positions of the largest activations, `i32[L, B, sinks]`; -1: none."""
        model, n = prompt.model, prompt.tokens.shape[1]
        assert isinstance(model, LayeredModel)
        width, P = min(CHUNK, n), self.sinks
        empty = unpadded(shapes, length.shape[0], kv[0].shape[2], kv[0].dtype).replace(kv=tuple(kv))

        def chunk(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            begin = jnp.minimum(i * width, n - width)
            start = jnp.full(length.shape, begin, jnp.int32)
            positions = begin + jnp.arange(width, dtype=jnp.int32)
            live = (positions < length[:, None]) & (positions >= i * width)
            tokens = lax.dynamic_slice_in_dim(prompt.tokens, begin, width, 1)
            # tokens that the last chunk shares with the one before are in the window alone
            cache = empty.replace(length=jnp.minimum(start, length))
            window = causal(tokens, start, positions < length[:, None])
            x, run = model.walk(prompt.params, window, cache)
            rows = []
            for layer in range(len(shapes)):
                size = jnp.where(live[..., None], jnp.abs(x).astype(jnp.float32), -1).reshape(len(x), -1)
                found, which = lax.top_k(size, min(P, size.shape[1]))
                both = jnp.concatenate([best[0][layer], found], 1)
                place = jnp.concatenate([best[1][layer], positions[which // x.shape[-1]]], 1)
                most, index = lax.top_k(both, P)
                rows.append((most, jnp.where(most >= 0, jnp.take_along_axis(place, index, 1), -1)))
                x = run(layer, x)
            return jnp.stack([row[0] for row in rows]), jnp.stack([row[1] for row in rows])

        none = jnp.full((len(shapes), length.shape[0], P), -1, jnp.float32), \
            jnp.full((len(shapes), length.shape[0], P), -1, jnp.int32)
        return lax.fori_loop(0, -(-n // width), chunk, none)[1]

    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> tuple[Codes, Codes]:
        assert span is not None
        keys = join_heads(before_rotation(shape, kv[..., :shape.width], span.start))
        order = jnp.asarray(self.order.value[span.layer])
        keys = split_heads(transformed(keys, self.wide(shape))[:, order], shape.heads)
        values = kv[..., shape.width:]
        values = values @ jnp.asarray(hadamard(values.shape[-1]), values.dtype)
        return self._quantize(keys), self._quantize(values)

    def _quantize(self, x: Array) -> Codes:
        """Quantizes `f[G, n, d]`; `Codes.lows` are the values of `zero`."""
        G, n, d = x.shape
        groups = x.reshape(G, n, -1, self.group_size if d % self.group_size == 0 else d)
        high, low = (self.clip * of(groups, -1) for of in (jnp.max, jnp.min))
        step = (high - low) / (2**self.bits - 1)
        safe = jnp.where(step > 0, step, 1)
        zero = jnp.round(-low / safe)
        codes = jnp.clip(jnp.round(groups / safe[..., None]) + zero[..., None], 0, 2**self.bits - 1)
        # a group of one value alone has no step: it is that value, and its zero stands for it
        step, zero = jnp.where(step > 0, step, -low / self.clip), jnp.where(step > 0, zero, 1)
        codes = jnp.where(high[..., None] > low[..., None], codes, 0).astype(jnp.uint8).reshape(G, n, d)
        return Codes(codes=pack(codes, self.bits), steps=step.astype(x.dtype), lows=zero.astype(x.dtype))

    def _dequantize(self, codes: Codes, dtype: Any) -> Array:
        """Inverts `_quantize`, up to the quantization error."""
        x = unpack(codes.codes, self.bits).astype(dtype)
        groups = x.reshape(*codes.steps.shape, -1)
        return (codes.steps[..., None] * (groups - codes.lows[..., None])).reshape(x.shape).astype(dtype)

    def decode(self, shape: KVLayer, codes: tuple[Codes, Codes], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        back = jnp.asarray(np.argsort(self.order.value[span.layer]))
        keys = transformed(join_heads(self._dequantize(codes[0], dtype))[:, back], self.wide(shape))
        keys = after_rotation(shape, split_heads(keys, shape.heads), span.start)
        values = self._dequantize(codes[1], dtype)
        whole = jnp.concatenate([keys, values @ jnp.asarray(hadamard(values.shape[-1]), dtype)], -1)
        return span.study.put(whole, span.start) if self.sinks else whole


@CACHES.register("rotatekv", "RotateKV: Accurate and Robust 2-Bit KV Cache Quantization for LLMs via Outlier-Aware "
                 "Adaptive Rotations", "Su et al. 2025", family="quantize")
def rotatekv(order: Constant | None = None, bits: Literal[2, 4] = 2, group_size: Count = 128,
             clip: Annotated[float, Range(0, 1, above=True)] | None = None, heads: Count = 4, sinks: Whole = 20,
             residual_length: Count = 32) -> QuantizedConfig:
    """Keeps all tokens in 2 bits after a rotation of channels; tokens of massive activations and the latest tokens are
    not quantized.

    Robust at 2 bits. First fit the order of a model's channels with `decodax.train.fit_order`.

    Args:
        order: `i32[L, G d]`, a permutation of the rotated channels. Required.
        bits: number of bits of each number.
        group_size: number of channels of a head that share a scale.
        clip: share of a group's range that is covered. None: 0.8 with 2 bits, 1 with 4.
        heads: number of key heads that are rotated together.
        sinks: number of largest activations of a layer whose tokens are not quantized. 0: none, for models that cannot
            be run layer by layer.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many.
    """
    order = measured("order", order, Constant, "fit_order")
    clip = (0.8 if bits == 2 else 1.0) if clip is None else clip
    return QuantizedConfig(RotateKVCodec(order, bits, group_size, clip, heads, sinks), residual_length, "rotatekv")
