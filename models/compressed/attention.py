"""The attention of DeepSeek V4 (DeepSeek-AI, 2026): one key head, whose keys are the values, too, in three kinds of
layers. A query attends

- to the latest tokens alone, in a sliding window;
- and to one pooled key for each group of 4 tokens, of which an index chooses some (compressed sparse attention, CSA);
- or to one pooled key for each group of 128 tokens, to all of them (heavily compressed attention, HCA).

All keys that a query attends to share one softmax, with a learned sink of each head. A query sees the key of a group
from the group's last token on. Keys are rotated by the position of their token, those of groups by the position of the
group's first token, and as they are the values, too, the output is rotated back by the position of the query.

Queries come from a narrow latent. The outputs of a group of heads are narrowed together before they are projected to
the model's width.

The cache stores `[k, p, i]` for each token in a layer with pooled keys: its own key, and, at the last token of a group,
the pooled key `p` and the index key `i` of that group; at other tokens these are zeros.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import Pooling
from decodax.models.compressed.pooling import PoolWalk
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import STD, Linear, Norm
from decodax.models.packed import whole
from decodax.models.rope import rotate_last
from decodax.pallas_kernels.window_attention import PooledKeys, TopKeys


class SharedKeyAttention(nnx.Module):
    """Attention with one key head, as a module of a decoder layer, called like `Attention`."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        assert layer.shared_key is not None
        self.c, self.layer, rule = c, layer, layer.shared_key
        if c.heads % rule.groups:
            raise ValueError(f"groups: got {rule.groups}, takes a divisor of heads = {c.heads}")
        norm, narrow = NormConfig(eps=rule.eps), rule.groups * rule.out_rank
        self.q_a = Linear(rngs, (c.width, rule.query_rank), ("embed", None), False)
        self.q_a_norm = Norm(norm, (rule.query_rank,), (None,))
        self.q_b = Linear(rngs, (rule.query_rank, c.heads * c.head_dim), (None, "heads"), False)
        self.q_norm = Norm(NormConfig(eps=rule.eps, scaled=False), (c.head_dim,), (None,))
        self.kv = Linear(rngs, (c.width, c.head_dim), ("embed", None), False)
        self.kv_norm = Norm(norm, (c.head_dim,), (None,))
        self.o_a = Linear(rngs, (c.heads // rule.groups * c.head_dim, narrow), (None, "out_groups"), False)
        self.o_b = Linear(rngs, (narrow, c.width), ("out_groups", "embed"), False, STD / (2 * len(c.layers)) ** 0.5)
        self.sinks = nnx.Param(jnp.zeros(c.heads), axes=("heads",))
        self.pool = PoolPart(c, layer, layer.recurrent, rngs) if isinstance(layer.recurrent, Pooling) else None

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        (B, W, _), rope = x.shape, self.layer.rope
        assert rope is not None
        cos, sin = tables[rope]
        narrow = self.q_a_norm(self.q_a(x))
        q = rotate_last(self.q_norm(self.q_b(narrow).reshape(B, W, self.c.heads, -1)), cos, sin, rope.interleaved)
        key = rotate_last(self.kv_norm(self.kv(x))[:, :, None], cos, sin, rope.interleaved)
        options: dict[str, Any] = dict(scale=self.c.head_dim ** -0.5, sinks=self.sinks[...])
        if self.pool is None:
            out, entry = attend(index, q, key, key[..., :0], sliding=self.layer.sliding, **options)
        else:
            made, ring = attend(index, None, None, None, walk=self.pool.walk(x, tables))
            key = jnp.concatenate([key, self.pool.keys(made, tables)], -1)
            out, own = attend(index, q, key, key[..., :0], bias=self.pool.reads(x, narrow, tables), **options)
            entry = own, ring
        return self._projected(rotate_last(out, cos, -sin, rope.interleaved)), entry

    def _projected(self, out: Array) -> Array:
        """Projects the heads' outputs `f[B, W, H, d]` to the model's width, `f[B, W, D]`."""
        assert self.layer.shared_key is not None
        groups, shape = self.layer.shared_key.groups, out.shape[:2]
        kernel = whole(self.o_a.kernel.get_value(), out.dtype)
        kernel = kernel.reshape(kernel.shape[0], groups, -1)
        return self.o_b(jnp.einsum("bwgi,igr->bwgr", out.reshape(*shape, groups, -1), kernel).reshape(*shape, -1))


class PoolPart(nnx.Module):
    """The projections that pooled keys and their index are made of."""

    def __init__(self, c: DecoderConfig, layer: Layer, rule: Pooling, rngs: nnx.Rngs):
        assert layer.shared_key is not None
        self.c, self.rule, self.rope, self.sliding = c, rule, layer.rope, layer.sliding
        into = lambda width: Linear(rngs, (c.width, width), ("embed", None), False)
        norm = lambda width: Norm(NormConfig(eps=layer.shared_key.eps), (width,), (None,))
        bias = lambda width: nnx.Param(jnp.zeros((rule.every, width)), axes=(None, None))
        self.values, self.scores, self.bias = into(rule.inputs[0]), into(rule.inputs[1]), bias(rule.inputs[1])
        self.norm = norm(rule.width)
        if (index := rule.index) is not None:
            self.index_values, self.index_scores = into(rule.inputs[2]), into(rule.inputs[3])
            self.index_bias, self.index_norm = bias(rule.inputs[3]), norm(index.width)
            self.index_q = Linear(rngs, (layer.shared_key.query_rank, index.heads * index.width), (None, None), False)
            self.index_weigh = into(index.heads)

    def walk(self, x: Array, tables: dict[Any, Any]) -> PoolWalk:
        """Returns what makes the means of groups, from the layer's normalised inputs `x`, `f[B, W, D]`, and the result
        of `Decoder.tables`."""
        indexed = self.rule.index is not None
        parts = [self.values, self.scores, *((self.index_values, self.index_scores) if indexed else ())]
        biases = [self.bias, *((self.index_bias,) if indexed else ())]
        return PoolWalk(self.rule, (jnp.concatenate([part(x) for part in parts], -1),),
                        jnp.concatenate([bias[...] for bias in biases], -1), tables[None])

    def keys(self, made: Array, tables: dict[Any, Any]) -> Array:
        """Returns the keys of groups, normed and rotated, `f[B, W, 1, Pooling.made]`, from their means, `f[B, W,
        Pooling.made]`."""
        assert self.rope is not None
        cos, sin = tables[self.rope, self.rule.every]
        width, norms = self.rule.width, [self.norm, *((self.index_norm,) if self.rule.index is not None else ())]
        parts = [made[..., :width], made[..., width:]]
        return jnp.concatenate([rotate_last(norm(part)[:, :, None], cos, sin, self.rope.interleaved)
                                for norm, part in zip(norms, parts, strict=False)], -1)

    def reads(self, x: Array, narrow: Array, tables: dict[Any, Any]) -> PooledKeys:
        """Returns how the nodes of a window attend: to which tokens, and to which pooled keys.

        Args:
            x: the layer's normalised inputs, `f[B, W, D]`.
            narrow: the latents of the queries, `f[B, W, query_rank]`.
            tables: see `Decoder.tables`.
        """
        chooser, rule = None, self.rule.index
        if rule is not None and self.rope is not None:
            queries = self.index_q(narrow).reshape(*x.shape[:2], rule.heads, rule.width)
            weights = self.index_weigh(x).astype(jnp.float32) * (rule.heads * rule.width) ** -0.5
            cos, sin = tables[self.rope]
            chooser = TopKeys(rotate_last(queries, cos, sin, self.rope.interleaved), weights, rule.top)
        return PooledKeys(self.c.head_dim, self.rule.every, self.sliding, chooser)
