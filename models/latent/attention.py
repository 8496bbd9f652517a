"""Multi-head latent attention (DeepSeek-AI, 2024) in its two forms.

A token has one latent `c` (`f[rank]`, normalised) and one rotated key `r` (`f[rope.width]`), which all heads share; in
Kimi Linear `r` is not rotated.
Head `h` has the key `[c @ K_h, r]` and the value `c @ V_h`. The cache stores `[c, r]` for each token: 576 numbers in
DeepSeek V3, where keys and values of its 128 heads would be 40,960.

- The expanded form computes keys and values of the heads and attends with them. It takes fewer operations if there are
  as many queries as keys, as in a prompt.
- The absorbed form moves the matrices to the other side: `q @ (c @ K_h) = (q @ K_h.T) @ c`, and the weighted sum of
  values is the weighted sum of latents times `V_h`. To the cache, this is grouped-query attention with one key head,
  whose keys are the values, too. It reads each latent once for all heads, so it is the form for everything but prompts:
  decoding, chains and trees of drafts.

In a prompt, the tokens of a chunk attend to each other in the expanded form and to earlier chunks in the absorbed one.
Both give the same result up to rounding.

With a lightning indexer (`decodax.models.latent.shape.Indexer`) a query attends to some tokens only. The cache then
stores `[c, r, i]` with the token's index key `i`, and all windows take the absorbed form, whose queries are zero on the
entries of `i`. Layers that read the latents of another one (Mistral Large 4) add their own index keys to its entries,
`[c, r, i, j, ...]`; each chooses by one of them.

Tokens of a group may have one index key together (GLM-5.3 Flash). It is stored with the group's last token, as in
`decodax.models.compressed.pooling`, and `i` is zero at the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from decodax.cache.entry import KVEntry
from decodax.core.capabilities import AttendsAlone
from decodax.core.window import Window
from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import Pooling
from decodax.models.compressed.pooling import PoolWalk
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import STD, Linear, Norm, optional, weight
from decodax.models.packed import whole
from decodax.models.rope import rotate, rotate_last
from decodax.pallas_kernels.window_attention import TopGroups, TopKeys, merge, window_attention_lse, with_sinks


class LatentAttention(nnx.Module):
    """Multi-head latent attention as a module of a decoder layer, called like `Attention`: keys and values of all heads
    are computed from one narrow latent vector of each token, which the cache stores."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        assert layer.latent is not None
        self.c, self.layer, latent, turned = c, layer, layer.latent, layer.latent.shared(layer.rope)
        norm = lambda width: Norm(NormConfig(eps=latent.eps), (width,), (None,))
        narrow, queries = latent.query_rank, c.heads * c.head_dim
        self.q = Linear(rngs, (c.width, queries), ("embed", "heads"), False) if narrow is None else None
        self.q_a = None if narrow is None else Linear(rngs, (c.width, narrow), ("embed", None), c.qkv_bias)
        self.q_a_norm = None if narrow is None else norm(narrow)
        self.q_b = None if narrow is None else Linear(rngs, (narrow, queries), (None, "heads"), False)
        own = layer.reads is None
        self.kv_a = Linear(rngs, (c.width, latent.rank + turned), ("embed", None), c.qkv_bias) if own else None
        self.kv_a_norm = norm(latent.rank) if own else None
        self.growth = LogScale(c.heads, "heads") if latent.log_scale else None
        up = lambda width: Linear(rngs, (latent.rank, c.heads * width), (None, "heads"), False)
        self.k_b, self.v_b = up(c.head_dim - turned), up(latent.value_width)
        self.indexer = None if latent.indexer is None or latent.indexer.shared else IndexerPart(c, layer, rngs)
        gate = layer.output_gate
        self.gate = None if gate is None else Linear(rngs, (c.width, c.heads * (
            1 if gate.each == "heads" else latent.value_width)), ("embed", "heads"), gate.bias)
        self.sinks = nnx.Param(jnp.zeros(c.heads), axes=("heads",)) if layer.sinks else None
        self.o = Linear(rngs, (c.heads * latent.value_width, c.width), ("heads", "embed"), c.out_bias,
                        STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        narrow = self._narrow(x)
        q, scale = self._queries(narrow, tables), self.layer.scale
        scale = self.c.head_dim ** -0.5 if scale is None else scale
        options: dict[str, Any] = dict(scale=scale) if self.sinks is None else dict(scale=scale, sinks=self.sinks[...])
        if self.layer.latent is not None and self.layer.latent.indexer is not None:
            key, chooser, ring = self._chosen(index, x, narrow, tables, attend)
            out, entry = attend(index, self.absorbed(q, key.shape[-1]), key, key[..., :0], bias=chooser, **options)
            return self._projected(x, self.values(out)), entry if ring is None else (entry, ring)
        key = self._keys(x, tables)
        if isinstance(attend, Expanding):
            out, entry = attend.expanded(index, self, q, key, **options)
        else:
            out, entry = attend(index, self.absorbed(q), key, key[..., :0], **options)
            out = self.values(out)
        return self._projected(x, out), entry

    def _projected(self, x: Array, out: Array) -> Array:
        """Projects the heads' output `f[B, W, H, value_width]` to the residual stream. `x`: the layer's input."""
        if self.gate is not None and self.layer.output_gate is not None:
            # One number for each channel, or for all channels of a head.
            gate = self.layer.output_gate(self.gate(x).astype(jnp.float32)).astype(out.dtype)
            out = out * gate.reshape(*out.shape[:3], -1)
        return self.o(out.reshape(*x.shape[:2], -1))

    def _chosen(self, index: int, x: Array, narrow: Array, tables: dict[Any, Any], attend: Any
                ) -> tuple[Array, TopKeys | TopGroups, Any]:
        """Returns the latents of the layer, or of that which it reads, with rotated and index keys, `f[B, W, 1, d]`,
        the choice among them, and the entry of pooled index keys, if the layer computes such. Layer `index` leaves in
        `tables` what layers after it may share: its choice under "indexer", and the parts of keys under the index of
        the layer that computes the latents."""
        c, source, ring = self.c, index if self.layer.reads is None else self.layer.reads, None
        if self.indexer is not None:
            own, every = self.indexer.key(x, tables), None
            if self.indexer.pool is not None:
                own, ring = attend(index, None, None, None, walk=self.indexer.pool.walk(own, x, tables))
                every = self.indexer.pool.rule.every
            tables["indexer"] = index, own[:, :, None], self.indexer.chooser(x, narrow, tables), every
        lead, own, choice, every = tables["indexer"]
        parts = tables["latents", source] if self.kv_a is None else {None: self._keys(x, tables)}
        tables["latents", source] = parts = {**parts, lead: own}
        # The cache has the index keys of later layers, too. In the window they are not known yet, and nothing reads
        # them: queries are zero there.
        stored = c.index_keys(source)
        keys = [parts.get(i, jnp.zeros_like(own)) for i in stored]
        before = parts[None].shape[-1] + own.shape[-1] * stored.index(lead)
        after = own.shape[-1] * (len(stored) - 1 - stored.index(lead))
        key = jnp.concatenate([parts[None], *keys], -1)
        if every is not None:
            return key, TopGroups(choice, before, every), ring
        queries = jnp.pad(choice.queries, ((0, 0),) * 3 + ((before, after),))
        return key, dataclasses.replace(choice, queries=queries), ring

    def _narrow(self, x: Array) -> Array:
        """Returns what the queries are computed from: their latent, or the residual stream."""
        return x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))

    def _queries(self, narrow: Array, tables: dict[Any, Any]) -> Array:
        """Returns the queries `f[B, W, H, head_dim]`, of which the last `rope.width` entries are rotated."""
        up = self.q_b if self.q is None else self.q
        assert up is not None
        q = self._turned(up(narrow).reshape(*narrow.shape[:2], -1, self.c.head_dim), tables)
        q = q if self.layer.latent is None or self.layer.latent.query_factor == 1.0 else (
            q * self.layer.latent.query_factor)
        q = q if self.growth is None else self.growth(q, tables[None])
        return q if self.layer.query_scale is None else q * tables[self.layer.query_scale].astype(q.dtype)

    def _keys(self, x: Array, tables: dict[Any, Any]) -> Array:
        """Returns the latents with the rotated key, `f[B, W, 1, rank + rope.width]`."""
        assert self.kv_a is not None and self.kv_a_norm is not None
        both, rank = self.kv_a(x), self._rank
        latent = self.kv_a_norm(both[..., :rank])
        if self.layer.latent is not None and self.layer.latent.factor != 1.0:
            latent = latent * self.layer.latent.factor
        both = jnp.concatenate([latent, both[..., rank:]], -1)
        return self._turned(both[:, :, None], tables)

    @property
    def _rank(self) -> int:
        assert self.layer.latent is not None
        return self.layer.latent.rank

    def _turned(self, x: Array, tables: dict[Any, Any]) -> Array:
        """Rotates the last `rope.width` entries, if there is a rope."""
        if (rope := self.layer.rope) is None:
            return x
        cos, sin = tables[rope]
        return rotate_last(x, cos, sin, rope.interleaved)

    def expand(self, key: Array) -> tuple[Array, Array]:
        """Returns the keys `f[B, K, H, head_dim]` and values `f[B, K, H, value_width]` of all heads, from latents with
        their rotated keys, `f[B, K, 1, rank + rope.width]`."""
        latent = key[:, :, 0, :self._rank]
        k, v = (part(latent).reshape(*latent.shape[:2], self.c.heads, -1) for part in (self.k_b, self.v_b))
        turned = jnp.broadcast_to(key[..., self._rank:], (*k.shape[:3], key.shape[-1] - self._rank))
        return jnp.concatenate([k, turned], -1), v

    def absorbed(self, q: Array, width: int | None = None) -> Array:
        """Returns queries of latents, `f[B, W, H, rank + rope.width]`, from `f[B, W, H, head_dim]`; with `width`, zeros
        are appended up to that width."""
        kernel = whole(self.k_b.kernel.get_value(), q.dtype).reshape(self._rank, self.c.heads, -1)
        plain = kernel.shape[-1]
        q = jnp.concatenate([jnp.einsum("bwhn,chn->bwhc", q[..., :plain], kernel), q[..., plain:]], -1)
        return q if width is None else jnp.pad(q, ((0, 0),) * 3 + ((0, width - q.shape[-1]),))

    def values(self, out: Array) -> Array:
        """Returns the heads' output `f[B, W, H, value_width]`, from weighted sums of latents with their rotated keys,
        `f[B, W, H, rank + rope.width]`."""
        kernel = whole(self.v_b.kernel.get_value(), out.dtype).reshape(self._rank, self.c.heads, -1)
        return jnp.einsum("bwhc,chv->bwhv", out[..., :self._rank], kernel)


class LogScale(nnx.Module):
    """A factor of the queries of each head that grows with the logarithm of the position, `scale * log(1 + position) +
    bias` with learned numbers ("Scalable-Softmax Is Superior for Attention", Nakanishi, 2025). It keeps the attention
    of long texts from becoming flat."""

    def __init__(self, heads: int, axis: str | None):
        self.scale = nnx.Param(jnp.zeros(heads), axes=(axis,))
        self.bias = nnx.Param(jnp.ones(heads), axes=(axis,))

    def __call__(self, q: Array, positions: Array) -> Array:
        """Returns the queries `f[B, W, H, d]` times their factors, at positions `i32[B, W]`."""
        # Nodes that are not live may have positions below 0.
        logs = jnp.log1p(jnp.maximum(positions, 0).astype(jnp.float32))[..., None]
        factors = logs * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return q * factors[..., None].astype(q.dtype)


class IndexerPart(nnx.Module):
    """The projections of a lightning indexer, which scores the tokens of the text to choose those that a query attends
    to."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        latent = layer.latent
        assert latent is not None and latent.indexer is not None
        self.rule, self.rope, rule = latent.indexer, layer.rope, latent.indexer
        norm = lambda width, axis: Norm(NormConfig("layer", rule.eps, bias=True), (width,), (axis,))
        into, axis = (c.width, "embed") if latent.query_rank is None else (latent.query_rank, None)
        self.q_in = norm(into, axis) if latent.query_rank is None else None
        self.q = Linear(rngs, (into, rule.heads * rule.width), (axis, None), False)
        self.k = Linear(rngs, (c.width, rule.width), ("embed", None), False)
        self.k_norm = norm(rule.width, None)
        self.growth = LogScale(rule.heads, None) if latent.log_scale else None
        self.weigh = Linear(rngs, (c.width, rule.heads), ("embed", None), False)
        self.pool = IndexPool(c, layer.recurrent, rngs) if isinstance(layer.recurrent, Pooling) else None

    def _turned(self, x: Array, tables: dict[Any, Any]) -> Array:
        if self.rope is None:
            return x
        cos, sin = tables[self.rope]
        return (rotate_last if self.rule.last else rotate)(x, cos, sin, self.rule.interleaved)

    def key(self, x: Array, tables: dict[Any, Any]) -> Array:
        """Returns the index keys `f[B, W, width]`, normed and rotated, of the layer's normalised inputs `x`, `f[B, W,
        D]`."""
        return self._turned(self.k_norm(self.k(x))[:, :, None], tables)[:, :, 0]

    def chooser(self, x: Array, narrow: Array, tables: dict[Any, Any]) -> TopKeys:
        """Returns the choice among index keys for the nodes of a window.

        Args:
            x: the normalised residual stream, `f[B, W, D]`.
            narrow: the latents of the queries, `f[B, W, query_rank]`, or without such latents `x`.
            tables: see `Decoder.tables`.
        """
        rule = self.rule
        queries = self.q(optional(self.q_in, narrow)).reshape(*x.shape[:2], rule.heads, rule.width)
        queries = queries if self.growth is None else self.growth(queries, tables[None])
        queries = self._turned(queries, tables)
        weights = self.weigh(x).astype(jnp.float32) * (rule.heads * rule.width) ** -0.5
        return TopKeys(queries, weights, rule.top if self.pool is None else rule.top // self.pool.rule.every)


class IndexPool(nnx.Module):
    """The shares with which the index keys of the tokens of a group are added to that of the group: a softmax over the
    tokens, for each channel, of a projection of the token and a number for its place in the group."""

    def __init__(self, c: DecoderConfig, rule: Pooling, rngs: nnx.Rngs):
        self.rule = rule
        # Stored as in files; kernels of linear layers are transposed.
        self.scores = weight(rngs, (rule.width, c.width), (None, "embed"))
        self.bias = nnx.Param(jnp.zeros((rule.every, rule.width)), axes=(None, None))

    def walk(self, keys: Array, x: Array, tables: dict[Any, Any]) -> PoolWalk:
        """Returns what makes the index keys of groups, from those of tokens, `f[B, W, width]`, the layer's normalised
        inputs `x`, `f[B, W, D]`, and the result of `Decoder.tables`."""
        scores = x @ self.scores[...].astype(x.dtype).T
        return PoolWalk(self.rule, (jnp.concatenate([keys, scores], -1),), self.bias[...], tables[None])


class Expanding:
    """The attention function of a prompt, for a network with latent attention: tokens of the window attend to each
    other in the expanded form.

    Args:
        near: returns attention among the window's tokens and the logarithms of its softmax sums, from queries, keys and
            values of each head.
        far: the same for attention to the cache in the absorbed form, from a layer's index and queries of latents;
            None: there is no cache.
        begun: `bool[]`, False if the cache is still empty in all rows.
    """

    def __init__(self, near: Callable[..., tuple[Array, Array]],
                 far: Callable[..., tuple[Array, Array]] | None = None, begun: Array | None = None):
        self.near, self.far, self.begun = near, far, begun

    @classmethod
    def of(cls, cache: Any, window: Window) -> Expanding | None:
        """Returns the attention function for a window of a prompt. None for windows while decoding, and for caches that
        do more than attend to their entries: these attend in the absorbed form, with queries mapped to latents."""
        if not window.is_prefill or window.cached is not None or not isinstance(cache, AttendsAlone):
            return None
        near = lambda q, k, v, scale: window_attention_lse(q, k, v, window.visible(), window.positions, scale=scale)
        if not cache.capacity:
            return cls(near)
        return cls(near, lambda layer, q, scale: cache.attend_cached(layer, q, window, scale=scale),
                   (cache.length > 0).any())

    def __call__(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
        raise NotImplementedError("all layers of a network with latent attention have it")

    def expanded(self, layer: int, part: LatentAttention, q: Array, key: Array, scale: float,
                 sinks: Array | None = None) -> tuple[Array, Any]:
        """Computes a layer's attention with keys and values of all heads for the window's tokens. Returns the heads'
        output `f[B, W, H, value_width]`, and the layer's entry, what a commit writes to the cache.

        Args:
            layer: index of the layer.
            part: the layer's attention.
            q: queries, `f[B, W, H, head_dim]`.
            key: latents with their rotated keys, `f[B, W, 1, rank + rope.width]`.
            scale: factor of the scores.
            sinks: `f[H]`, see `window_attention`; None: none.
        """
        near = self.near(q, *part.expand(key), scale=scale)

        def both() -> tuple[Array, Array]:
            assert self.far is not None
            found, more = self.far(layer, part.absorbed(q), scale=scale)
            return merge(near, (part.values(found), more))

        found = near if self.far is None else lax.cond(self.begun, both, lambda: near)
        out = found[0] if sinks is None else with_sinks(found, sinks)[0]
        return out, KVEntry(key, key[..., :0])
