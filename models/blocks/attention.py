"""Attention of a decoder's layer, and the function that computes it from the cache."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import LinearTerms
from decodax.models.blocks.block_index import BlockIndexer
from decodax.models.blocks.group_index import GroupIndexer
from decodax.models.blocks.options import BlockIndex, Layer
from decodax.models.config import DecoderConfig
from decodax.models.dual_chunk import DualChunk
from decodax.models.layers import STD, Linear, Norm, head_norm, optional
from decodax.models.rope import rotate


class Attend(Protocol):
    """The attention function of a network's layers, with the signature of `Cache.attend`.

    Queries `f[B, W, H, d]` attend to the cache and to the window's keys and values, `f[B, W, G, d]`. The result is the
    output `f[B, W, H, d]` and the layer's entry, what a commit writes to the cache. A layer with linear attention
    passes only the argument `linear`.
    """

    def __call__(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Any]: ...


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., 2023) as a module of a decoder layer. It projects its input to queries,
    keys and values, applies their norms and rotations, and projects what they attend to.

    A call takes the index of the layer, the input `f[B, W, D]`, the result of `Decoder.tables`, and the function that
    computes the attention from the cache (`Attend`). It returns the output `f[B, W, D]`, and the layer's entry, which a
    commit writes to the cache.

    Args:
        c: configuration of the decoder.
        layer: options of the layer, which may leave out some of the projections.
        rngs: random numbers for the weights.
    """

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        self.c, self.layer = c, layer
        width, own, rule, gate = c.key_width(layer), layer.reads is None, layer.linear, layer.output_gate
        attends, has_keys = layer.echoes is None, own and layer.echoes is None
        groups, heads = c.groups(layer), c.query_heads(layer)
        keys, values, wide = groups * width, groups * c.value_width(layer) * c.values_of_key, c.value_width(layer)
        into = lambda out, axis: Linear(rngs, (c.width, out), ("embed", axis), c.qkv_bias)
        self.q = into(heads * width, "heads") if attends else None
        self.k = into(keys, "kv_heads") if has_keys else None
        self.v = into(values, "kv_heads") if own and not layer.keys_as_values else None
        self.o = Linear(rngs, (heads * wide, c.width), ("heads", "embed"), c.out_bias,
                        STD / (2 * len(c.layers)) ** 0.5)
        self.gate = None if gate is None else Linear(
            rngs, (c.width, heads if gate.each == "heads" else heads * wide), ("embed", "heads"), gate.bias)
        self.q_norm = head_norm(c, heads, width, "heads") if attends and layer.qk_norm else None
        self.k_norm = head_norm(c, groups, width, "kv_heads") if has_keys and layer.qk_norm else None
        self.v_norm = Norm(c.value_norm, (wide,), (None,)) if own and c.value_norm is not None else None
        self.index = None if layer.index is None else BlockIndexer(c, layer, rngs) if isinstance(
            layer.index, BlockIndex) else GroupIndexer(c, layer, rngs)
        self.sinks = nnx.Param(jnp.zeros(heads), axes=("heads",)) if layer.sinks else None
        if rule is not None:
            # Training begins with zeros, that is, with the sum within a group alone.
            self.factor = nnx.Param(jnp.zeros(1), axes=(None,)) if rule.factor else None
            self.taps = nnx.Param(jnp.zeros((heads, rule.taps)), axes=("heads", None)) if rule.taps else None
            self.encoder_k = into(keys, "kv_heads") if rule.prefix else None
            self.encoder_v = into(values, "kv_heads") if rule.prefix else None

    def __call__(self, index: int, x: Array, tables: dict[Any, Any],
                 attend: Attend) -> tuple[Array, Any]:
        if self.q is None:
            return self._projected(x, *attend(index, None, None, self._values(x)))
        # Without the barrier a TPU's compiler chooses layouts for the heads that make it transpose these kernels.
        q, k, v = jax.lax.optimization_barrier(tuple(None if part is None else part(x)
                                                     for part in (self.q, self.k, self.v)))
        if k is not None:
            # Values of the heads that share keys are adjacent, as one wide head.
            v = self._scaled(k if v is None else v)
            k = self._placed(k, self.k_norm, tables)
        q, c = self._placed(q, self.q_norm, tables), self.c
        if self.layer.query_scale is not None:
            q = q * tables[self.layer.query_scale].astype(q.dtype)
        if self.layer.linear is not None:
            out, entry = self._linear(index, x, q, k, v, tables, attend)
            return self.o(out.reshape(*x.shape[:2], -1)), entry
        scale = c.key_width(self.layer) ** -0.5 if self.layer.scale is None else self.layer.scale
        options: dict[str, Any] = dict(scale=scale, sliding=self.layer.sliding, softcap=c.attention_softcap)
        if self.layer.rope is not None and self.layer.rope.chunks is not None:
            options["bias"] = DualChunk(self.layer.rope, scale)
        elif self.layer.bias is not None:
            options["bias"] = self.layer.bias
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        if isinstance(self.index, GroupIndexer):
            k, options["bias"], ring = self.index(index, x, k, tables, attend)
            out, entry = self._projected(x, *attend(index, q, k, v, **options))
            return out, (entry, ring)
        if self.index is not None:
            k, options["bias"] = self.index(x, k, tables)
        return self._projected(x, *attend(index, q, k, v, **options))

    def keys_values(self, x: Array, tables: dict[Any, Any]) -> tuple[Array, Array]:
        """Returns the keys (normed and rotated) and the values, `f[B, W, G, d]` each, of inputs `x`, `f[B, W, D]`, as a
        cache stores them. `tables` has the cosine and sine of each rotary embedding."""
        assert self.k is not None
        k = self.k(x)
        v = self._scaled(k if self.v is None else self.v(x))
        return self._placed(k, self.k_norm, tables), v

    def _values(self, x: Array) -> Array:
        """Returns the values, split into heads."""
        made = self.k if self.v is None else self.v
        assert made is not None
        return self._scaled(made(x))

    def _scaled(self, v: Array) -> Array:
        v = self._clipped(v).reshape(*v.shape[:2], self.c.groups(self.layer), -1)
        v = optional(self.v_norm, v)
        return v if self.c.value_scale == 1.0 else v * self.c.value_scale

    def _clipped(self, y: Array) -> Array:
        clip = self.c.qkv_clip
        return y if clip is None else jnp.clip(y, -clip, clip)

    def _projected(self, x: Array, out: Array, entry: Any) -> tuple[Array, Any]:
        """Projects the heads' output to the residual stream; returns it with the layer's entry."""
        c = self.c
        if (r := c.values_of_key) > 1:
            # Each query head takes its own value head out of the wide head.
            out = out.reshape(*x.shape[:2], c.kv_heads, r, -1, r, c.head_dim)
            out = jnp.einsum("bwgrmre->bwgrme", out)
        if self.gate is not None and self.layer.output_gate is not None:
            # One number for each channel, or for all channels of a head.
            gate = self.layer.output_gate(self.gate(x)).reshape(*x.shape[:2], c.query_heads(self.layer), -1)
            out = out.reshape(*gate.shape[:3], -1) * gate
        return self.o(out.reshape(*x.shape[:2], -1)), entry

    def _linear(self, index: int, x: Array, q: Array, k: Any, v: Any, tables: dict[Any, Any],
                attend: Attend) -> tuple[Array, Any]:
        rule = self.layer.linear
        assert rule is not None
        encoder = None
        if self.encoder_k is not None and self.encoder_v is not None:
            encoder = (self._placed(self.encoder_k(x), self.k_norm, tables),
                       self.encoder_v(x).reshape(*x.shape[:2], self.c.kv_heads, -1))
        if rule.unit:
            q, k = (y * jax.lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + 1e-12) for y in (q, k))
        here = lambda x: None if x is None else x[...]
        return attend(index, q, k, v, linear=LinearTerms(rule=rule, factor=here(self.factor), taps=here(self.taps),
                                                         encoder=encoder))

    def _split(self, y: Array) -> Array:
        return y.reshape(*y.shape[:2], -1, self.c.key_width(self.layer))

    def _placed(self, y: Array, norm: Norm | None, tables: dict[Any, Any]) -> Array:
        """Splits queries or keys into heads, and applies their norm and rotation."""
        c, rope = self.c, self.layer.rope

        def turned(y: Array) -> Array:
            if rope is None:
                return y
            cos, sin = tables[rope]
            return rotate(y, cos, sin, rope.interleaved)

        if norm is None:
            return turned(self._split(self._clipped(y)))
        if c.qk_norm_after:
            return norm(turned(self._split(self._clipped(y))))
        if c.qk_norm == "full":
            return turned(self._split(self._clipped(norm(y))))
        return turned(norm(self._split(self._clipped(y))))
