"""Keys and values in 2 bits behind a rotation that spreads what is large ("RotateKV: Accurate and Robust 2-Bit KV Cache
Quantization for LLMs via Outlier-Aware Adaptive Rotations", Su et al., 2025).

A Walsh-Hadamard transform spreads the large channels of keys over those of some heads together, before their rotation
to a position; channels are then put in the order of their sums on texts, so that what shares a step is alike. Values
are transformed head by head. Tokens of massive activations, which attention falls back on, stay whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache import dense
from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant
from decodax.caches.quantize.codecs import Codec, Codes, Span, pack, unpack
from decodax.caches.quantize.turning import after_rotation, apart, before_rotation, together
from decodax.common.struct import Struct, struct
from decodax.core.cache import PyTree, ReadPrompt
from decodax.core.types import LayeredModel
from decodax.core.window import causal

CHUNK = 256
"""Tokens of a prompt whose activations are looked at together."""


def hadamard(width: int) -> np.ndarray:
    """The Walsh-Hadamard matrix `f32[width, width]` in Sylvester's order, orthonormal and its own inverse.

    >>> (hadamard(2) * 2 ** 0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    h = np.ones((1, 1))
    while len(h) < width:
        h = np.block([[h, h], [h, -h]])
    return (h / math.sqrt(width)).astype(np.float32)


def spread(keys: Array, width: int) -> Array:
    """`f[n, G d]` under the transform of each `width` channels; its own inverse."""
    return (keys.reshape(len(keys), -1, width) @ jnp.asarray(hadamard(width), keys.dtype)).reshape(keys.shape)


@struct
class Sinks(Struct):
    """Tokens that stay whole: `i32[P]` positions (the first ones of equal ones count), `f[G, P, d + e]`; of a row, or
    of several."""

    at: Array
    kv: Array


@dataclasses.dataclass(frozen=True)
class Rotated(Codec):
    """Few bits of each token's channels behind a transform.

    With a range `low` to `high` of a group of channels, clipped to `clip` of both, `step = clip (high - low) / (2^bits
    - 1)` and `zero = round(-clip low / step)`, a code is `round(x / step) + zero`. The authors' code has `bits^2 - 1`
    levels, which is the same for 2 and 4 bits.

    Attributes:
        order: `i32[L, G d]`, the places of channels behind the transform (`decodax.train.fit_order`).
        bits: 2 or 4. group: channels of a head that share a step. clip: see above.
        heads: that are transformed together.
        sinks: how many of the largest activations that enter a layer have their tokens kept whole, of a prompt.
    """

    order: Constant
    bits: int = 2
    group: int = 128
    clip: float = 0.8
    heads: int = 4
    sinks: int = 20

    places = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits: got {self.bits}, takes 2 or 4")
        if self.group < 1 or self.heads < 1 or self.sinks < 0 or not 0 < self.clip <= 1:
            raise ValueError(f"group, heads, sinks, clip: got {self.group}, {self.heads}, {self.sinks} and "
                             f"{self.clip}, takes 1 or more, 1 or more, 0 or more, and more than 0 up to 1")

    @property
    def unit(self) -> int:
        return 1

    def wide(self, shape: KVLayer) -> int:
        """Channels that are transformed together: those of `heads` heads, or of all where they are fewer."""
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

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[Sinks]:
        """The tokens whose activations are largest, at the input of each layer: a prompt is read once more for it."""
        B = length.shape[0]
        at = jnp.full((len(shapes), B, self.sinks), -1, jnp.int32)
        if prompt is not None and self.sinks:
            at = self._massive(shapes, kv, length, prompt)
        take = jax.vmap(lambda kv, at: kv[:, jnp.maximum(at, 0)])
        return [Sinks(at=own, kv=take(whole, own)) for own, whole in zip(at, kv, strict=True)]

    def _massive(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, prompt: ReadPrompt) -> Array:
        """`i32[L, B, sinks]`."""
        model, n = prompt.model, prompt.tokens.shape[1]
        if not isinstance(model, LayeredModel) or model.depth != len(shapes):
            raise ValueError("cache: rotatekv looks at what enters each layer, so it takes a model whose layers can be "
                             "run one by one; sinks=0 takes any")
        width, P = min(CHUNK, n), self.sinks
        empty = dense(shapes, length.shape[0], kv[0].shape[2], kv[0].dtype).replace(kv=tuple(kv))

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
        keys = together(before_rotation(shape, kv[..., :shape.width], span.start))
        order = jnp.asarray(self.order.value[span.layer])
        keys = apart(spread(keys, self.wide(shape))[:, order], shape.heads)
        values = kv[..., shape.width:]
        values = values @ jnp.asarray(hadamard(values.shape[-1]), values.dtype)
        return self.few(keys), self.few(values)

    def few(self, x: Array) -> Codes:
        """The codes of `f[G, n, d]`; `Codes.lows` are the zeros."""
        G, n, d = x.shape
        groups = x.reshape(G, n, -1, self.group if d % self.group == 0 else d)
        high, low = (self.clip * of(groups, -1) for of in (jnp.max, jnp.min))
        step = (high - low) / (2**self.bits - 1)
        safe = jnp.where(step > 0, step, 1)
        zero = jnp.round(-low / safe)
        codes = jnp.clip(jnp.round(groups / safe[..., None]) + zero[..., None], 0, 2**self.bits - 1)
        # a group of one value alone has no step: it is that value, and its zero stands for it
        step, zero = jnp.where(step > 0, step, -low / self.clip), jnp.where(step > 0, zero, 1)
        codes = jnp.where(high[..., None] > low[..., None], codes, 0).astype(jnp.uint8).reshape(G, n, d)
        return Codes(codes=pack(codes, self.bits), steps=step.astype(x.dtype), lows=zero.astype(x.dtype))

    def many(self, codes: Codes, dtype: Any) -> Array:
        """The inverse of `few`."""
        x = unpack(codes.codes, self.bits).astype(dtype)
        groups = x.reshape(*codes.steps.shape, -1)
        return (codes.steps[..., None] * (groups - codes.lows[..., None])).reshape(x.shape).astype(dtype)

    def decode(self, shape: KVLayer, codes: tuple[Codes, Codes], dtype: Any, span: Span | None = None) -> Array:
        assert span is not None
        back = jnp.asarray(np.argsort(self.order.value[span.layer]))
        keys = spread(together(self.many(codes[0], dtype))[:, back], self.wide(shape))
        keys = after_rotation(shape, apart(keys, shape.heads), span.start)
        values = self.many(codes[1], dtype)
        whole = jnp.concatenate([keys, values @ jnp.asarray(hadamard(values.shape[-1]), dtype)], -1)
        if not self.sinks:
            return whole
        at = span.study.at - span.start
        return whole.at[:, jnp.where((at >= 0) & (span.study.at >= 0), at, whole.shape[1])].set(
            span.study.kv.astype(dtype), mode="drop")
