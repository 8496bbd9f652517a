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
entries of `i`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from decodax.cache.entry import KVEntry
from decodax.core.capabilities import AttendsAlone
from decodax.core.window import Window
from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import STD, Linear, Norm
from decodax.models.packed import whole
from decodax.models.rope import rotate, rotate_last
from decodax.pallas_kernels.window_attention import TopKeys, merge, window_attention_lse


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
        self.kv_a = Linear(rngs, (c.width, latent.rank + turned), ("embed", None), c.qkv_bias)
        self.kv_a_norm = norm(latent.rank)
        up = lambda width: Linear(rngs, (latent.rank, c.heads * width), (None, "heads"), False)
        self.k_b, self.v_b = up(c.head_dim - turned), up(latent.value_width)
        self.indexer = None if latent.indexer is None or latent.indexer.shared else IndexerPart(c, layer, rngs)
        self.o = Linear(rngs, (c.heads * latent.value_width, c.width), ("heads", "embed"), c.out_bias,
                        STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        narrow = self._narrow(x)
        q, key = self._queries(narrow, tables), self._keys(x, tables)
        scale = self.c.head_dim ** -0.5 if self.layer.scale is None else self.layer.scale
        if self.layer.latent is not None and self.layer.latent.indexer is not None:
            if self.indexer is not None:
                # Under a name of its own, for the layers after this one that share the choice.
                tables["indexer"] = self.indexer.key(x, tables)[:, :, None], self.indexer.chooser(
                    x, narrow, tables, key.shape[-1] + self.indexer.rule.width)
            own, chooser = tables["indexer"]
            key = jnp.concatenate([key, own], -1)
            out, entry = attend(index, self.absorbed(q, key.shape[-1]), key, key[..., :0], scale=scale, bias=chooser)
            return self.o(self.values(out).reshape(*x.shape[:2], -1)), entry
        if isinstance(attend, Expanding):
            out, entry = attend.expanded(index, self, q, key, scale)
        else:
            out, entry = attend(index, self.absorbed(q), key, key[..., :0], scale=scale)
            out = self.values(out)
        return self.o(out.reshape(*x.shape[:2], -1)), entry

    def _narrow(self, x: Array) -> Array:
        """Returns what the queries are computed from: their latent, or the residual stream."""
        return x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))

    def _queries(self, narrow: Array, tables: dict[Any, Any]) -> Array:
        """Returns the queries `f[B, W, H, head_dim]`, of which the last `rope.width` entries are rotated."""
        up = self.q_b if self.q is None else self.q
        assert up is not None
        q = self._turned(up(narrow).reshape(*narrow.shape[:2], -1, self.c.head_dim), tables)
        return q if self.layer.query_scale is None else q * tables[self.layer.query_scale].astype(q.dtype)

    def _keys(self, x: Array, tables: dict[Any, Any]) -> Array:
        """Returns the latents with the rotated key, `f[B, W, 1, rank + rope.width]`."""
        both, rank = self.kv_a(x), self._rank
        both = jnp.concatenate([self.kv_a_norm(both[..., :rank]), both[..., rank:]], -1)
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


class IndexerPart(nnx.Module):
    """The projections of a lightning indexer, which scores the tokens of the text to choose those that a query attends
    to."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        latent = layer.latent
        assert latent is not None and latent.indexer is not None and latent.query_rank is not None
        self.rule, self.rope, rule = latent.indexer, layer.rope, latent.indexer
        self.q = Linear(rngs, (latent.query_rank, rule.heads * rule.width), (None, None), False)
        self.k = Linear(rngs, (c.width, rule.width), ("embed", None), False)
        self.k_norm = Norm(NormConfig("layer", 1e-6, bias=True), (rule.width,), (None,))
        self.weigh = Linear(rngs, (c.width, rule.heads), ("embed", None), False)

    def _turned(self, x: Array, tables: dict[Any, Any]) -> Array:
        cos, sin = tables[self.rope]
        return rotate(x, cos, sin, self.rule.interleaved)

    def key(self, x: Array, tables: dict[Any, Any]) -> Array:
        """Returns the index keys `f[B, W, width]`, normed and rotated, of the layer's normalised inputs `x`, `f[B, W,
        D]`."""
        return self._turned(self.k_norm(self.k(x))[:, :, None], tables)[:, :, 0]

    def chooser(self, x: Array, narrow: Array, tables: dict[Any, Any], width: int) -> TopKeys:
        """Returns the choice of keys for the nodes of a window.

        Args:
            x: the normalised residual stream, `f[B, W, D]`.
            narrow: the latents of the queries, `f[B, W, query_rank]`.
            tables: see `Decoder.tables`.
            width: number of channels of a cached key, whose last ones are the index key.
        """
        rule = self.rule
        queries = self._turned(self.q(narrow).reshape(*x.shape[:2], rule.heads, rule.width), tables)
        queries = jnp.pad(queries, ((0, 0),) * 3 + ((width - rule.width, 0),))
        weights = self.weigh(x).astype(jnp.float32) * (rule.heads * rule.width) ** -0.5
        return TopKeys(queries, weights, rule.top)


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

    def expanded(self, layer: int, part: LatentAttention, q: Array, key: Array, scale: float) -> tuple[Array, Any]:
        """Computes a layer's attention with keys and values of all heads for the window's tokens. Returns the heads'
        output `f[B, W, H, value_width]`, and the layer's entry, what a commit writes to the cache.

        Args:
            layer: index of the layer.
            part: the layer's attention.
            q: queries, `f[B, W, H, head_dim]`.
            key: latents with their rotated keys, `f[B, W, 1, rank + rope.width]`.
            scale: factor of the scores.
        """
        out, sums = self.near(q, *part.expand(key), scale=scale)

        def both() -> Array:
            assert self.far is not None
            found, more = self.far(layer, part.absorbed(q), scale=scale)
            return merge((out, sums), (part.values(found), more))[0]

        if self.far is not None:
            out = lax.cond(self.begun, both, lambda: out)
        return out, KVEntry(key, key[..., :0])
