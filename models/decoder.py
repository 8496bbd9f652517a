"""The decoder-only transformer: one network whose options include GPT-2, Llama, Mistral, Qwen, Gemma and others.

The network does not depend on the decoding algorithm: it calls `attend(layer, q, k, v, ...)` once for each layer, which
returns the attention's output and the layer's entry for the cache. With a cache that is `cache.attend`; in training it
is attention among the given tokens alone.

Each weight is a separate array, layers are unrolled and kernels are stored `[in, out]`: a scan over stacked layers
would copy each layer's weights on CPU. Norms, rotations and softmax are float32 whatever the weights' dtype.
"""

from __future__ import annotations

from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.core.types import CanvasNodes, PartialForward
from decodax.models.blocks.attention import Attend
from decodax.models.blocks.layer import DecoderLayer, Keep
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.drafters.hidden_transfer import Transfer
from decodax.models.echoes import Echoes, Near
from decodax.models.images import Images
from decodax.models.kv_shapes import number, numbered
from decodax.models.layers import Linear, Norm, optional, weight
from decodax.models.packed import Packed, embedded, head, multiply, whole
from decodax.models.residual.conditioning import SelfConditioning
from decodax.models.residual.gated_connections import GatedEnds
from decodax.models.residual.hyper_connections import HyperEnds
from decodax.models.residual.layer_inputs import LayerInputTable
from decodax.models.residual.options import GatedConnections, HyperConnections, Streams
from decodax.models.residual.streams import StreamEnds
from decodax.models.rope import Rope


class Decoder(nnx.Module):
    """The network. Every weight's path, shape, initial value and logical axes are declared here and nowhere else."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.c, self.default_dtype = c, "float32"
        self.embed = weight(rngs, (c.vocab, c.width), ("vocab", "embed"))
        rows = c.learned_positions + c.position_offset
        self.positions = weight(rngs, (rows, c.width), (None, "embed")) if c.learned_positions else None
        self.embed_norm = Norm(c.embed_norm_kind or c.norm, (c.width,), ("embed",)) if c.embed_norm else None
        self.layers = nnx.Dict({str(i): DecoderLayer(c, layer, rngs) for i, layer in enumerate(c.layers)})
        # Gated connections norm the streams.
        self.norm = None if isinstance(c.streams, GatedConnections) else Norm(
            c.last_norm_kind or c.norm, (c.width,), ("embed",))
        self.rope_factors = nnx.Param(jnp.zeros(c.rope_factors), axes=(None,)) if c.rope_factors else None
        self.conditioning = SelfConditioning(c, rngs) if c.conditioned else None
        self.layer_inputs = LayerInputTable(c, rngs) if c.layer_inputs is not None else None
        ends: dict[Any, Any] = {HyperConnections: HyperEnds, GatedConnections: GatedEnds, Streams: StreamEnds}
        self.streams = None if c.streams is None else ends[type(c.streams)](c, rngs)
        self.lm_head = None if c.tied else Linear(rngs, (c.width, c.vocab), ("embed", "vocab"), c.head_bias)

    def __call__(self, x: Array, positions: Array, attend: Attend, context: int | None = None, keep: Keep | None = None,
                 begun: PartialForward | None = None, near: Near | None = None, images: Images | None = None,
                 inputs: Array | None = None, canvas: CanvasNodes | None = None, transfer: Transfer | None = None
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
            inputs: what layers take beside the residual stream, from the method `inputs`, or None.
            canvas: the nodes of a canvas for a network with self-conditioning; None: there are none.
            transfer: the nodes that are made of others at some layer; None: there are none.

        Returns:
            Hidden states `f[B, W, D]` after the final norm, each layer's entry, and the residual stream `f[B, W, D]`
            after each layer; with hyper-connections, all streams after the last layer follow, `f[B, W, n D]`.
        """
        tables = self.tables(positions, context, inputs, images)
        tables["canvas"] = None if canvas is None else canvas.inside
        added = () if images is None else images.after_layers(positions)
        entries, states = ([], []) if begun is None else (list(begun.entries), list(begun.layers))
        x = states[-1] if states else x
        echoes = None
        if self.c.shared or self.c.shortcuts or self.streams is not None:
            if keep is not None or begun is not None or transfer is not None:
                why = ("some add what the mixture of another computed" if self.c.shortcuts else
                       "they have several residual streams" if not self.c.shared else
                       "some read the keys and values of others" if any(
                           layer.reads is not None or layer.echoes is not None for layer in self.c.layers) else
                       "some take the choice of tokens of others")
                raise ValueError(f"layers: {why}, so none can be left out for all nodes or some")
            if self.c.echoed:
                assert near is not None
                attend = echoes = Echoes(self.c, attend, near)
            elif self.c.shared:
                attend = self._sharing(attend)
        if not self.c.shared and [layer for layer, _ in self.c.entries] != list(range(len(self.c.layers))):
            attend = numbered(self.c, attend)
        x = x if self.streams is None else self.streams.split(x)
        for i in range(len(states), len(self.c.layers)):
            own = (True, True) if keep is None else keep[:, i] if isinstance(keep, Array) else keep[i]
            x, entry = self.layers[str(i)](i, x, tables, attend, own)
            if i and self.c.layers[i - 1].shortcut is not None:
                x = x + tables.pop("shortcut")
            x = x if transfer is None else transfer(i, x)
            if i < len(added):
                x = x + added[i].astype(x.dtype)
            if i in self.c.own:
                entries += entry if len(self.c.layers[i].parts) > 1 else [entry]
            elif (reads := self.c.layers[i].reads) is not None and self.c.layers[i].latent is not None:
                entries[self.c.own.index(reads)] = entry        # now with the index keys of this layer
            states.append(x if self.streams is None else self.streams.shown(x))
        if echoes is not None:
            entries = echoes.entries(entries)
        if isinstance(self.streams, HyperEnds):
            states.append(x.reshape(*x.shape[:2], -1))
        x = x if self.streams is None else self.streams.join(x)
        return optional(self.norm, x), tuple(entries), tuple(states)

    def _sharing(self, attend: Attend) -> Attend:
        """Returns the attention function for all layers, in order, made from `attend`, which has only the layers that
        compute keys and values."""
        made: dict[int, tuple[Array, Array]] = {}

        def shared(layer: int, q: Array, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
            if "walk" in options:
                return attend(number(self.c, layer, options), q, k, v, **options)
            reads = self.c.layers[layer].reads
            source = layer if reads is None else reads
            if k is not None:       # of its own, or latents of the other layer with index keys of its own
                made[source] = k, v
            return attend(number(self.c, source, options), q, *made[source], **options)

        return shared

    def embedded(self, tokens: Array, positions: Array, embeddings: Array | None = None,
                 which: Array | None = None) -> Array:
        """Returns the residual stream `f[B, W, D]` before the first layer.

        Args:
            tokens: `i32[B, W]`.
            positions: `i32[B, W]`.
            embeddings: `f[B, W, D]`, used in place of the token's embedding at the nodes in `which`.
            which: `bool[B, W]`.

        Raises:
            ValueError: there are embeddings, and experts are chosen by token ids.
        """
        if embeddings is not None and self.c.hashed:
            raise ValueError("inputs: got embeddings, takes tokens, by which this model chooses experts")
        x = embedded(self.embed.get_value(), tokens, self.dtype)
        if embeddings is not None and which is not None:
            x = jnp.where(which[..., None], embeddings.astype(x.dtype), x)
        if self.c.embed_scale != 1.0:
            # The factor is rounded to the weights' dtype, as in the models' training.
            x = x * jnp.asarray(self.c.embed_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions[...].at[positions + self.c.position_offset].get(mode="clip")
        return optional(self.embed_norm, x)

    def inputs(self, tokens: Array, x: Array, which: Array | None = None) -> Array | None:
        """Returns the per-layer embeddings of all layers, `f[B, W, L, d]`, for models that have them (Gemma 3n); the
        tokens `i32[B, W]` for models whose layers need them (`DecoderConfig.takes_tokens`); else None. For the
        arguments see `LayerInputTable.__call__`."""
        if self.c.takes_tokens:
            return tokens
        return None if self.layer_inputs is None else self.layer_inputs(tokens, x, which)

    def expected(self, probabilities: Array) -> Array:
        """Returns the expected embedding `f[..., D]` under probabilities `f[..., V]`."""
        table = whole(self.embed.get_value(), self.dtype)
        return probabilities.astype(table.dtype) @ table * jnp.asarray(self.c.embed_scale, table.dtype)

    def with_default_dtype(self, dtype: Any) -> Self:
        """Sets the dtype of activations that is used if no weight tells it, because all are packed; returns the network
        itself."""
        self.default_dtype = dtype
        return self

    @property
    def dtype(self) -> Any:
        """The dtype of activations: that of the final norm's scale, the learned positions or the embedding table, the
        first of them that exists and is not packed. If none is, it is the one set by `with_default_dtype`."""
        for own in (None if self.norm is None else self.norm.scale, self.positions, self.embed):
            if own is not None and not isinstance(table := own.get_value(), Packed):
                return table.dtype
        return jnp.dtype(self.default_dtype)

    def tables(self, positions: Array, context: int | None, inputs: Array | None = None,
               images: Images | None = None) -> dict[Any, Any]:
        """Returns what layers look up at positions `i32[B, W]`: by each rotary embedding its cosine and sine, by each
        query scale its factors, the positions under None, and under "inputs" the result of `inputs`. A rope with the
        number of tokens of a group gives cosine and sine at the group's first token. `context`: see `Rope.table`."""
        ropes = {layer.rope for layer in self.c.layers if layer.rope is not None}
        scales = {layer.query_scale for layer in self.c.layers if layer.query_scale is not None}
        table = Rope.table if images is None else images.table
        factors = None if self.rope_factors is None else jnp.exp(self.rope_factors[...].astype(jnp.float32))
        groups = {(layer.rope, layer.recurrent.every) for layer in self.c.layers
                  if layer.rope is not None and isinstance(layer.recurrent, Pooling)}
        return {rope: table(rope, positions, context, factors) for rope in ropes} | {
            (rope, every): table(rope, positions // every * every, context, factors) for rope, every in groups} | {
            scale: scale.table(positions) for scale in scales} | {None: positions, "inputs": inputs, "canvas": None}

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
