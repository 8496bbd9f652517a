"""The decoder-only transformer: one network whose options include GPT-2, Llama, Mistral, Qwen, Gemma and others.

The network does not depend on the decoding algorithm: it calls `attend(layer, q, k, v, ...)` once for each layer, which
returns the attention's output and the layer's entry for the cache. With a cache that is `cache.attend`; in training it
is attention among the given tokens alone.

Each weight is a separate array, layers are unrolled and kernels are stored `[in, out]`: a scan over stacked layers
would copy each layer's weights on CPU. Norms, rotations and softmax are float32 whatever the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import LinearTerms
from decodax.core.types import PartialForward
from decodax.models.config import DecoderConfig, Layer
from decodax.models.dual_chunk import DualChunk
from decodax.models.echoes import Echoes, Near
from decodax.models.feed_forward import MLP, Mixture
from decodax.models.images import Images
from decodax.models.latent.attention import LatentAttention
from decodax.models.layers import STD, Linear, Norm, head_norm, kept, weight
from decodax.models.packed import Packed, embedded, head, multiply
from decodax.models.recurrent.blocks import Block, recurrent_block
from decodax.models.residual.layer_inputs import LayerFactor, LayerInput, LayerInputTable
from decodax.models.residual.streams import LowRankPath, StreamEnds, StreamMixer
from decodax.models.rope import Rope, rotate

Keep = Sequence[tuple[bool, bool]] | Array
"""The parts of the layers that run: attention and MLP of each, fixed; or as data, whole layers `bool[B or 1, L]` or
their halves `bool[B or 1, L, 2]`. Parts that are left out add nothing to the residual stream. With data, a part is
computed for all rows if some row keeps it, so one set for all rows saves the most. The entry of an attention that is
left out is meaningless; that of one that is always left out is `()`."""


class Attend(Protocol):
    """The attention function of a network's layers, with the signature of `Cache.attend`.

    Queries `f[B, W, H, d]` attend to the cache and to the window's keys and values, `f[B, W, G, d]`. The result is the
    output `f[B, W, H, d]` and the layer's entry. A layer with linear attention passes only the argument `linear`.
    """

    def __call__(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Any]: ...


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., 2023)."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        self.c, self.layer = c, layer
        width, own, rule = c.key_width(layer), layer.reads is None, layer.linear
        attends, has_keys = layer.echoes is None, own and layer.echoes is None
        groups = c.groups(layer)
        keys, values, wide = groups * width, groups * c.value_width(layer) * c.values_of_key, c.value_width(layer)
        into = lambda out, axis: Linear(rngs, (c.width, out), ("embed", axis), c.qkv_bias)
        self.q = into(c.heads * width, "heads") if attends else None
        self.k = into(keys, "kv_heads") if has_keys else None
        self.v = into(values, "kv_heads") if own and not layer.keys_as_values else None
        self.o = Linear(rngs, (c.heads * wide, c.width), ("heads", "embed"), c.out_bias,
                        STD / (2 * len(c.layers)) ** 0.5)
        self.gate = into(c.heads * wide, "heads") if layer.output_gate else None
        self.q_norm = head_norm(c, c.heads, width, "heads") if attends and layer.qk_norm else None
        self.k_norm = head_norm(c, groups, width, "kv_heads") if has_keys and layer.qk_norm else None
        self.v_norm = Norm(c.value_norm, (wide,), (None,)) if own and c.value_norm is not None else None
        self.sinks = nnx.Param(jnp.zeros(c.heads), axes=("heads",)) if layer.sinks else None
        if rule is not None:
            # Training begins with zeros, that is, with the sum within a group alone.
            self.factor = nnx.Param(jnp.zeros(1), axes=(None,)) if rule.factor else None
            self.taps = nnx.Param(jnp.zeros((c.heads, rule.taps)), axes=("heads", None)) if rule.taps else None
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
        return self._projected(x, *attend(index, q, k, v, **options))

    def _values(self, x: Array) -> Array:
        """Returns the values, split into heads."""
        made = self.k if self.v is None else self.v
        assert made is not None
        return self._scaled(made(x))

    def _scaled(self, v: Array) -> Array:
        v = self._clipped(v).reshape(*v.shape[:2], self.c.groups(self.layer), -1)
        v = _optional(self.v_norm, v)
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
        out = out.reshape(*x.shape[:2], -1)
        return self.o(out if self.gate is None else out * jax.nn.sigmoid(self.gate(x))), entry

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


class DecoderLayer(nnx.Module):
    """Attention and MLP, or experts, with norms as set by `DecoderConfig.block`."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        self.c = c
        norm = lambda present: Norm(c.norm, (c.width,), ("embed",)) if present else None
        block, attends, feeds = layer.block or c.block, layer.half != "mlp", layer.half != "attention"
        self.attn_in = norm(block != "post" and attends)
        self.attn = self._mixer(layer, rngs) if attends else None
        self.beside = recurrent_block(c, layer.recurrent, rngs) if layer.beside and layer.recurrent else None
        self.attn_out = norm(block in ("post", "sandwich") and attends)
        apart = layer.experts is not None and layer.experts.branch_norms
        self.mlp_in = norm((block in ("pre", "sandwich") or c.twin_norms) and feeds and not apart)
        self.mlp = None if not feeds else Mixture(c, layer.experts, rngs) if layer.experts is not None else (
            MLP(c, rngs, layer.mlp, sparsity=layer.sparsity))
        self.mlp_out = norm(block in ("post", "sandwich") and feeds)
        self.inputs = LayerInput(c, rngs) if c.layer_inputs is not None else None
        self.factor = LayerFactor() if c.layer_scale else None
        self.streams = StreamMixer(c, rngs) if c.streams is not None else None
        self.low_rank = LowRankPath(c, rngs, c.streams.rank) if c.streams is not None else None

    def _mixer(self, layer: Layer, rngs: nnx.Rngs) -> Attention | LatentAttention | Block:
        """Returns the layer's attention, or the block in its place."""
        if layer.latent is not None:
            return LatentAttention(self.c, layer, rngs)
        if layer.recurrent is None or layer.beside:
            return Attention(self.c, layer, rngs)
        return recurrent_block(self.c, layer.recurrent, rngs)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Attend,
                 keep: tuple[bool, bool] | Array = (True, True)) -> tuple[Array, Any]:
        if isinstance(keep, Array) and keep.ndim == 1:
            after, entry = kept(lambda x: self(index, x, tables, attend), x, keep)
            return jnp.where(keep[:, None, None], after, x), entry
        if self.streams is not None and self.inputs is not None:
            x = self.streams.predicted(x)
            active, entry = self._block(index, x[:, :, self.streams.options.active], tables, attend, keep)
            x = self.streams.corrected(x, active)
            more = self.inputs(self.streams.scaled(x), tables["inputs"][:, :, index])
            return x.at[:, :, 1:].add(more[:, :, None]), entry
        x, entry = self._block(index, x, tables, attend, keep)
        return self._finished(index, x, tables, keep[:, 1] if isinstance(keep, Array) else keep[1]), entry

    def _block(self, index: int, x: Array, tables: dict[Any, Any], attend: Attend,
               keep: tuple[bool, bool] | Array) -> tuple[Array, Any]:
        """Returns the residual stream after attention and MLP, and the layer's entry."""
        scale, mlp = self.c.residual_scale, self.mlp
        keeps = (keep[:, 0], keep[:, 1]) if isinstance(keep, Array) else keep
        normed = _optional(self.attn_in, x)
        entry = ()
        if self.attn is not None:
            branch, entry = self._attention(index, normed, tables, attend, keeps[0])
            if self.c.block == "parallel":
                assert mlp is not None
                beside = self.mlp_in(x) if self.mlp_in is not None else normed
                return x + scale * (branch + kept(mlp, beside, keeps[1])), entry
            x = x + scale * branch
        if self.low_rank is not None:
            x = (x + self.low_rank(normed)) * 2 ** -0.5
        if mlp is None:
            return x, entry
        inside = lambda x: _optional(self.mlp_out, mlp(_optional(self.mlp_in, x)))
        return x + scale * kept(inside, x, keeps[1]), entry

    def _finished(self, index: int, x: Array, tables: dict[Any, Any], keep: bool | Array) -> Array:
        """Returns the residual stream with what follows the MLP, in rows that keep it."""
        if (self.inputs is None and self.factor is None) or keep is False:
            return x
        y = x if self.inputs is None else x + self.inputs(x, tables["inputs"][:, :, index])
        y = y if self.factor is None else self.factor(y)
        return y if keep is True else jnp.where(keep[:, None, None], y, x)

    def attention_half(self, index: int, x: Array, tables: dict[Any, Any],
                       attend: Attend) -> tuple[Array, Any]:
        """Returns the output of attention, which is added to the residual stream, and the layer's entry."""
        branch, entry = self._attention(index, _optional(self.attn_in, x), tables, attend, True)
        return self.c.residual_scale * branch, entry

    def mlp_half(self, x: Array) -> Array:
        """Returns the output of the MLP, which is added to the residual stream. `x` is the stream after attention, in a
        `parallel` block the stream before it."""
        alone = self.c.block == "parallel" and not self.c.twin_norms
        normed = _optional(self.attn_in if alone else self.mlp_in, x)
        assert self.mlp is not None
        return self.c.residual_scale * _optional(self.mlp_out, self.mlp(normed))

    def values(self, x: Array) -> Array:
        """Returns only the attention's values, `f[B, W, G, d]`."""
        assert isinstance(self.attn, Attention)
        return self.attn._values(_optional(self.attn_in, x))

    def _attention(self, index: int, x: Array, tables: dict[Any, Any], attend: Attend,
                   keep: bool | Array) -> tuple[Array, Any]:
        def inside(x: Array) -> tuple[Array, Any]:
            assert self.attn is not None
            branch, entry = self.attn(index, x, tables, attend)
            if self.beside is not None:
                more, own = self.beside(index, x, tables, attend)
                branch, entry = branch + more, (entry, own)
            return _optional(self.attn_out, branch), entry

        if keep is False:
            return jnp.zeros_like(x), () if self.beside is None else ((), ())
        return kept(inside, x, keep)


class Decoder(nnx.Module):
    """The network. Every weight's path, shape, initial value and logical axes are declared here and nowhere else."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.c, self.default_dtype = c, "float32"
        self.embed = weight(rngs, (c.vocab, c.width), ("vocab", "embed"))
        rows = c.learned_positions + c.position_offset
        self.positions = weight(rngs, (rows, c.width), (None, "embed")) if c.learned_positions else None
        self.embed_norm = Norm(c.norm, (c.width,), ("embed",)) if c.embed_norm else None
        self.layers = nnx.Dict({str(i): DecoderLayer(c, layer, rngs) for i, layer in enumerate(c.layers)})
        self.norm = Norm(c.norm, (c.width,), ("embed",))
        self.layer_inputs = LayerInputTable(c, rngs) if c.layer_inputs is not None else None
        self.streams = StreamEnds(c, rngs) if c.streams is not None else None
        self.lm_head = None if c.tied else Linear(rngs, (c.width, c.vocab), ("embed", "vocab"), c.head_bias)

    def __call__(self, x: Array, positions: Array, attend: Attend, context: int | None = None, keep: Keep | None = None,
                 begun: PartialForward | None = None, near: Near | None = None, images: Images | None = None,
                 inputs: Array | None = None
                 ) -> tuple[Array, tuple[Any, ...], tuple[Array, ...]]:
        """Runs the layers.

        Args:
            x: the residual stream `f[B, W, D]` before the first layer; see `embedded`.
            positions: `i32[B, W]`.
            attend: the attention function.
            context: the sequence length for which length-dependent rope scalings are set; None: the trained length.
            keep: the parts of the layers that run; None: all.
            begun: the first layers, if they have already run.
            near: attention among the given tokens alone, for layers that use the attention weights of others.
            images: the images in the rows; None: there are none.
            inputs: those of all layers, from `LayerInputTable`, or None.

        Returns:
            Hidden states `f[B, W, D]` after the final norm, each layer's entry, and the residual stream `f[B, W, D]`
            after each layer.
        """
        tables = self.tables(positions, context, inputs, images)
        added = () if images is None else images.after_layers(positions)
        entries, states = ([], []) if begun is None else (list(begun.entries), list(begun.layers))
        x = states[-1] if states else x
        echoes = None
        if self.c.shared or self.streams is not None:
            if keep is not None or begun is not None:
                why = ("some read the keys and values of others" if self.c.shared else
                       "they have several residual streams")
                raise ValueError(f"layers: {why}, so none can be left out")
            if self.c.echoed:
                assert near is not None
                attend = echoes = Echoes(self.c, attend, near)
            elif self.c.shared:
                attend = self._sharing(attend)
        elif len(self.c.entries) != len(self.c.layers) or any(layer.beside for layer in self.c.layers):
            attend = self._numbered(attend)
        x = x if self.streams is None else self.streams.split(x)
        for i in range(len(states), len(self.c.layers)):
            own = (True, True) if keep is None else keep[:, i] if isinstance(keep, Array) else keep[i]
            x, entry = self.layers[str(i)](i, x, tables, attend, own)
            if i < len(added):
                x = x + added[i].astype(x.dtype)
            if i in self.c.own:
                entries += entry if self.c.layers[i].beside else [entry]
            states.append(x if self.c.streams is None else x[:, :, self.c.streams.active])
        if echoes is not None:
            entries = echoes.entries(entries)
        x = x if self.streams is None else self.streams.join(x)
        return self.norm(x), tuple(entries), tuple(states)

    def _sharing(self, attend: Attend) -> Attend:
        """Returns the attention function for all layers, in order, made from `attend`, which has only the layers that
        compute keys and values."""
        made: dict[int, tuple[Array, Array]] = {}
        place = {layer: i for i, layer in enumerate(self.c.own)}

        def shared(layer: int, q: Array, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
            reads = self.c.layers[layer].reads
            if reads is None:
                reads, made[layer] = layer, (k, v)
            return attend(place[reads], q, *made[reads], **options)

        return shared

    def _numbered(self, attend: Attend) -> Attend:
        """Returns the attention function for the indices of layers, made from `attend`, which has the numbers of a
        cache's entries."""
        place = {entry: number for number, entry in enumerate(self.c.entries)}
        return lambda layer, q, k, v, **options: attend(place[layer, "walk" in options], q, k, v, **options)

    def embedded(self, tokens: Array, positions: Array, embeddings: Array | None = None,
                 which: Array | None = None) -> Array:
        """Returns the residual stream `f[B, W, D]` before the first layer.

        Args:
            tokens: `i32[B, W]`.
            positions: `i32[B, W]`.
            embeddings: `f[B, W, D]`, used in place of the token's embedding at the nodes in `which`.
            which: `bool[B, W]`.
        """
        x = embedded(self.embed.get_value(), tokens, self.dtype)
        if embeddings is not None and which is not None:
            x = jnp.where(which[..., None], embeddings.astype(x.dtype), x)
        if self.c.embed_scale != 1.0:
            # The factor is rounded to the weights' dtype, as in the models' training.
            x = x * jnp.asarray(self.c.embed_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions[...].at[positions + self.c.position_offset].get(mode="clip")
        return _optional(self.embed_norm, x)

    def inputs(self, tokens: Array, x: Array, which: Array | None = None) -> Array | None:
        """Returns the inputs of all layers, or None; see `LayerInputTable`."""
        return None if self.layer_inputs is None else self.layer_inputs(tokens, x, which)

    def with_default_dtype(self, dtype: Any) -> Self:
        """Sets the dtype of activations for weights that are all packed, and returns the network."""
        self.default_dtype = dtype
        return self

    @property
    def dtype(self) -> Any:
        """The dtype of activations: that of the final norm's scale, the learned positions or the embedding table, the
        first of them that is an array. If none is, it is the one set by `with_default_dtype`."""
        for own in (self.norm.scale, self.positions, self.embed):
            if own is not None and not isinstance(table := own.get_value(), Packed):
                return table.dtype
        return jnp.dtype(self.default_dtype)

    def tables(self, positions: Array, context: int | None, inputs: Array | None = None,
               images: Images | None = None) -> dict[Any, Any]:
        """Returns cosine and sine of each rotary embedding in the network, the factors of each query scale,
        the positions, as None, and the layers' inputs, as "inputs"."""
        ropes = {layer.rope for layer in self.c.layers if layer.rope is not None}
        scales = {layer.query_scale for layer in self.c.layers if layer.query_scale is not None}
        table = Rope.table if images is None else images.table
        return {rope: table(rope, positions, context) for rope in ropes} | {
            scale: scale.table(positions) for scale in scales} | {None: positions, "inputs": inputs}

    def logits(self, hidden: Array) -> Array:
        """Returns logits `f32[..., V]` of hidden states `f[..., D]`."""
        kernel = head(self.embed.get_value()) if self.lm_head is None else self.lm_head.kernel.get_value()
        logits = multiply(hidden, kernel, jnp.float32)
        if self.lm_head is not None and self.lm_head.bias is not None:
            logits = logits + self.lm_head.bias[...].astype(jnp.float32)
        if self.c.logit_scale != 1.0:
            logits = logits * self.c.logit_scale
        cap = self.c.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _optional(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
