"""The configuration of a decoder-only transformer: one hashable value that fixes shapes and options, without
weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from decodax.common.arguments import check_counts
from decodax.common.struct import short
from decodax.models.blocks.options import BlockIndex, Layer, lacks_next_layer
from decodax.models.residual.options import GatedConnections, HyperConnections, LayerInputs, Streams
from decodax.models.rope import Rope
from decodax.models.routing import ClippedSwiGLU

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
"""Activation of the MLP: `x sigmoid(x)`, the Gaussian error linear unit, its tanh approximation, `x sigmoid(1.702 x)`,
`max(x, 0)`, `max(x, 0) ** 2`, and xIELU, which has learned parameters (`decodax.models.feed_forward.XIELU`)."""


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """A normalisation over the last axis, computed in float32.

    Attributes:
        kind: "rms" (Zhang and Sennrich, 2019) or "layer" (Ba, Kiros and Hinton, 2016).
        eps: added to the variance.
        unit_offset: the scale is `1 + w` for the stored `w` (Gemma).
        bias: True adds a bias.
        scaled: False leaves out the learned scale, and the bias with it.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    unit_offset: bool = False
    bias: bool = False
    scaled: bool = True


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape and options of a decoder. Defaults are Llama's.

    Attributes:
        vocab: vocabulary size `V`.
        width: model width `D`.
        heads: number of query heads `H`, a multiple of `kv_heads`.
        kv_heads: number of key/value heads `G`.
        value_heads: number of value heads, a multiple of `kv_heads` and a divisor of `heads`; None: `kv_heads`.
        head_dim: number of channels `d` of a head.
        value_dim: number of channels of a head's values; None: `head_dim`.
        value_scale: factor of the values.
        mlp: number of inner channels of the MLP.
        layers: the options of each layer.
        context: trained number of positions (`max_position_embeddings`).
        norm: options of all norms over the model width.
        block: position of the norms in a block: "pre" (before attention and MLP), "post" (after each, inside the
            residual branch: OLMo 2), "sandwich" (both: Gemma 2), "parallel" (one norm feeds both branches: StableLM,
            Phi-2, Cohere).
        twin_norms: the two branches of a "parallel" block have a norm each (GPT-NeoX, Falcon 40B).
        qk_norm: norm of queries and keys before rotation: over each head with one scale for all heads ("head"), over
            all heads together ("full"), over each head with its own scale ("per_head"), or None.
        qk_norm_kind, embed_norm_kind, out_norm_kind, last_norm_kind: options of that norm, of the norm of embeddings,
            of those after attention and MLP, and of the one after the last layer; None: those of `norm`.
        qk_norm_after: True applies that norm after rotation.
        value_norm: norm of each head's values, with one scale for all heads if it has one; None: none.
        activation: activation function of the MLP.
        glu: the gated activation of MLPs and shared experts, with both projections of a gated MLP; None: that of
            `activation`.
        gated: True: the MLP is `down(act(gate(x)) * up(x))`; False: `down(act(up(x)))`.
        qkv_bias, out_bias, mlp_bias: True adds biases to these projections.
        qkv_clip: queries, keys and values are clipped to this absolute value after their projection; None: not.
        learned_positions: number of positions of the learned position embedding; 0: none.
        position_offset: number of rows of that embedding before the one of position 0 (OPT: 2).
        embed_norm: True applies a norm to the embeddings (BLOOM).
        tied: True uses the embedding table as the output head.
        head_bias: True adds a bias to an output head that is not tied.
        attention_softcap, logit_softcap: `cap` in `cap * tanh(x / cap)` of attention scores and of logits (Gemma 2).
        embed_scale, residual_scale, logit_scale: factors of embeddings, of each residual branch, and of logits.
        layer_inputs: an embedding of its own of each token for every layer, or None.
        streams: several residual streams. `Streams` take `layer_inputs` and "sandwich" blocks, the others no options
            of the residual stream and "pre" blocks. None: one.
        layer_scale: True multiplies the residual stream after each layer by a learned number.
        conditioned: True: the model fills a canvas after a causal text, and reads its last predictions there; the nodes
            of a canvas have factors of `layer_scale` of their own. See `decodax.models.residual.conditioning`.
        gate_scale, mlp_scale: factors of the MLP's gate before its activation, and of the MLP's outputs.
        rope_factors: number of learned numbers whose exponentials multiply the frequencies of all rotary embeddings,
            one for each frequency; 0: none.
    """

    __repr__ = short

    vocab: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    layers: tuple[Layer, ...]
    context: int
    norm: NormConfig = NormConfig()
    block: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    twin_norms: bool = False
    qk_norm: Literal["head", "full", "per_head"] | None = None
    qk_norm_kind: NormConfig | None = None
    qk_norm_after: bool = False
    value_norm: NormConfig | None = None
    activation: Activation = "silu"
    glu: ClippedSwiGLU | None = None
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qkv_clip: float | None = None
    learned_positions: int = 0
    position_offset: int = 0
    embed_norm: bool = False
    tied: bool = False
    head_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    value_heads: int | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    layer_inputs: LayerInputs | None = None
    streams: Streams | HyperConnections | GatedConnections | None = None
    layer_scale: bool = False
    conditioned: bool = False
    gate_scale: float = 1.0
    mlp_scale: float = 1.0
    rope_factors: int = 0
    embed_norm_kind: NormConfig | None = None
    out_norm_kind: NormConfig | None = None
    last_norm_kind: NormConfig | None = None

    def __post_init__(self) -> None:
        check_counts(self, "vocab", "width", "heads", "kv_heads", "head_dim", "mlp", "context")
        if not self.layers:
            raise ValueError("layers: got none, takes at least one")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: got {self.heads}, which is not a multiple of kv_heads = {self.kv_heads}")
        if self.value_heads is not None and (self.value_heads < 1 or self.value_heads % self.kv_heads
                                             or self.heads % self.value_heads):
            raise ValueError(f"value_heads: got {self.value_heads}, takes a multiple of kv_heads = {self.kv_heads} "
                             f"that divides heads = {self.heads}")
        if (self.value_dim is not None or any(
                layer.heads or layer.kv_heads or layer.head_dim for layer in self.layers)) and (
                self.echoed or self.stateful or self.value_heads is not None or self.qk_norm in ("full", "per_head")):
            raise ValueError("value_dim, heads, kv_heads or head_dim of a layer: take layers with attention weights of "
                             "their own, no value_heads, and norms of queries and keys of single heads")
        if any(layer.keys_as_values for layer in self.layers) and (
                self.echoed or self.stateful or self.value_heads is not None or self.value_dim is not None):
            raise ValueError("keys_as_values: takes layers with attention weights of their own, no value_heads and no "
                             "value_dim")
        if self.echoed and any(layer.reads is not None or layer.linear is not None for layer in self.layers):
            raise ValueError("echoes: got layers that repeat the attention of others and some that read their keys and "
                             "values, or have linear attention; takes one of these")
        if self.recurrent and (self.summing or not self.attending or any(
                layer.reading for layer in self.layers)):
            raise ValueError("recurrent: takes some layers with attention, and none that has linear attention or "
                             "shares that of others")
        if len({layer.state_kind for layer in self.layers if layer.recurrent is not None}) > 1:
            raise ValueError("recurrent: got blocks of several kinds, takes one kind")
        if self.block == "parallel" and any(layer.block is not None or layer.half for layer in self.layers):
            raise ValueError("block: got one of a layer in a decoder with parallel blocks, or half a layer, takes None")
        if any(layer.half for layer in self.layers) and not self.recurrent:
            raise ValueError("half: takes a decoder in which some layers have a recurrent block")
        if self.twin_norms and self.block != "parallel":
            raise ValueError(f"twin_norms: got True with block {self.block!r}, takes block 'parallel'")
        if self.layer_inputs is not None and (self.activation == "xielu" or self.block == "parallel"):
            raise ValueError("layer_inputs: takes an activation without parameters, and no parallel blocks")
        if isinstance(self.streams, HyperConnections | GatedConnections) and (
                self.layer_inputs is not None or self.layer_scale or self.block != "pre" or self.residual_scale != 1.0
                or any(x.block or x.half for x in self.layers)):
            raise ValueError("streams: hyper-connections take pre blocks with both halves, no layer_inputs, no "
                             "layer_scale and no residual_scale")
        if isinstance(self.streams, Streams) and (
                self.layer_inputs is None or self.layer_scale or self.block != "sandwich"):
            raise ValueError("streams: takes layer_inputs and sandwich blocks, and no layer_scale")
        if self.hashed and (self.layer_inputs is not None or self.block == "parallel"):
            raise ValueError("hashed: takes no layer_inputs and no parallel blocks")
        for own in (x.ngrams for x in self.layers if x.ngrams is not None):
            if not isinstance(self.streams, GatedConnections) or self.shared or (own.vocab, own.streams) != (
                    self.vocab, (self.streams.count, self.width)):
                raise ValueError(f"ngrams: got {own} with streams = {self.streams}, width {self.width} and vocab "
                                 f"{self.vocab}, takes GatedConnections, their number and width, the vocab of the "
                                 "decoder, and no layers that share what others compute")
        if self.shortcuts and (self.block != "pre" or self.streams or self.layer_inputs or self.layer_scale
                               or self.residual_scale != 1.0 or lacks_next_layer(self.layers)):
            which = [i for i, x in enumerate(self.layers) if x.shortcut is not None]
            raise ValueError(f"shortcut: got one in the layers {which} of {len(self.layers)}, with {self.block!r} "
                             "blocks, takes a next layer without one, pre blocks, and one residual stream as it is")
        if self.conditioned and (not self.layer_scale or self.streams is not None or self.layer_inputs is not None):
            raise ValueError("conditioned: takes layer_scale, one residual stream and no layer_inputs")
        if self.tied and self.head_bias:
            raise ValueError("head_bias: got True, a tied head takes False")
        if self.latent and (self.latent < len(self.attending) or self.summing or self.attention_softcap is not None
                            or self.qk_norm is not None or self.value_norm is not None
                            or self.value_heads is not None):
            raise ValueError("latent: takes all layers with attention, and no soft cap, qk_norm, value_norm or "
                             "value_heads")
        if (self.glu or any(layer.glu for layer in self.layers)) and not self.gated:
            raise ValueError("glu: got a gated activation, takes a gated MLP for it")
        for index in {layer.index for layer in self.layers if layer.index is not None}:
            if isinstance(index, BlockIndex) and (self.heads % index.heads or (
                    index.heads % self.kv_heads and self.kv_heads % index.heads)):
                raise ValueError(f"index heads: got {index.heads}, takes a divisor of heads = {self.heads} that is a "
                                 f"multiple or a divisor of kv_heads = {self.kv_heads}")
            if self.value_heads is not None or self.attention_softcap is not None:
                raise ValueError("index: takes no value_heads and no soft cap of the scores")
        if self.layers[0].chosen_before:
            raise ValueError("indexer: got a shared one in layer 0, takes one of its own there")
        for i, layer in enumerate(self.layers):
            for name in ("heads", "kv_heads", "head_dim", "mlp"):
                if getattr(layer, name) is not None and getattr(layer, name) < 1:
                    raise ValueError(f"{name}: got {getattr(layer, name)} for layer {i}, takes 1 or more, or None")
            if self.query_heads(layer) % self.groups(layer):
                raise ValueError(f"kv_heads: got {self.groups(layer)} for layer {i}, takes a divisor of heads = "
                                 f"{self.query_heads(layer)}")
            if layer.reads is not None and not (0 <= layer.reads < i and self.layers[layer.reads].reads is None
                                                and self.layers[layer.reads].linear is None
                                                and self.layers[layer.reads].rope == layer.rope
                                                and layer.latents_like(self.layers[layer.reads])
                                                and self.kv_shape(self.layers[layer.reads]) == self.kv_shape(layer)):
                raise ValueError(f"reads: got {layer.reads} for layer {i}, takes an earlier layer with keys and values "
                                 "of its own, the same rope, and heads of the same number and width")
            if layer.echoes is not None and not (
                    0 <= layer.echoes < i and layer.reads is None and self.layers[layer.echoes].echoes is None
                    and self.layers[layer.echoes].sliding == layer.sliding):
                raise ValueError(f"echoes: got {layer.echoes} for layer {i}, takes an earlier layer with attention of "
                                 "its own, and the same sliding window")
            if layer.rope is not None and layer.rope.chunks is not None and (
                    layer.sliding is not None or self.attention_softcap is not None):
                raise ValueError("chunks: dual chunk attention cannot be combined with a sliding window or a soft cap "
                                 "of the scores")
            if layer.linear is not None and (self.attention_softcap is not None or self.values_of_key > 1 or (
                    layer.rope is not None and layer.rope.chunks is not None)):
                raise ValueError("linear: cannot be combined with a soft cap of the scores, value_heads or dual chunk "
                                 "attention")
            if layer.linear is not None and layer.linear.width is not None and self.qk_norm is not None:
                raise ValueError("linear: a width of its own cannot be combined with qk_norm")
            if layer.rope is not None and layer.rope.width > self.key_width(layer):
                raise ValueError(f"rope width: got {layer.rope.width}, more than head_dim = {self.key_width(layer)}")
            if self.rope_factors and layer.rope is not None and (
                    layer.rope.width != 2 * self.rope_factors or layer.rope.chunks is not None):
                raise ValueError(f"rope_factors: got {self.rope_factors}, takes half the width of every rope, "
                                 f"{layer.rope.width}, without chunks")
            if layer.mixture is not None and (self.mlp_bias or self.activation == "xielu"):
                raise ValueError("experts: takes an MLP without biases, and an activation without parameters")
            if (e := layer.mixture) is not None and not self.gated and (e.bias or e.glu is not None):
                raise ValueError("experts: got a bias or a gated activation, takes a gated MLP for them")

    @property
    def values_of_key(self) -> int:
        """Number of value heads that share a key head."""
        return 1 if self.value_heads is None else self.value_heads // self.kv_heads

    def value_width(self, layer: Layer) -> int:
        """Returns the number of channels of a head's values in a layer."""
        return (layer.head_dim or self.head_dim) if self.value_dim is None else self.value_dim

    def kv_shape(self, layer: Layer) -> tuple[int, int]:
        """Returns the number of key/value heads of a layer, and the number of channels of each head's keys."""
        return self.groups(layer), self.key_width(layer)

    def query_heads(self, layer: Layer) -> int:
        """Returns the number of query heads of a layer."""
        return self.heads if layer.heads is None else layer.heads

    def groups(self, layer: Layer) -> int:
        """Returns the number of key/value heads of a layer."""
        return self.kv_heads if layer.kv_heads is None else layer.kv_heads

    def key_width(self, layer: Layer) -> int:
        """Returns the number of channels of a head's queries and keys in a layer."""
        linear = layer.linear
        return (layer.head_dim or self.head_dim) if linear is None or linear.width is None else linear.width

    @property
    def hashed(self) -> bool:
        """True if the experts of some layers are chosen by token ids."""
        return any(layer.experts is not None and layer.experts.hashed for layer in self.layers)

    @property
    def takes_tokens(self) -> bool:
        """True if layers need token ids: those with such experts, or with embeddings of n-grams."""
        return self.hashed or any(layer.ngrams is not None for layer in self.layers)

    @property
    def latent(self) -> int:
        """Number of layers with multi-head latent attention: 0, or all layers with attention."""
        return sum(layer.latent is not None for layer in self.layers)

    @property
    def indexed(self) -> bool:
        """True if queries attend to some tokens only, which an indexer chooses."""
        return any(layer.index is not None or (layer.latent is not None and layer.latent.indexer is not None)
                   for layer in self.layers)

    @property
    def own(self) -> tuple[int, ...]:
        """Indices of the layers that compute their own keys or states, for which a cache stores entries."""
        return tuple(i for i, layer in enumerate(self.layers)
                     if layer.reads is None and layer.echoes is None and layer.half != "mlp")

    @functools.cached_property
    def entries(self) -> tuple[tuple[int, int], ...]:
        """The entries that a cache stores, in its order: pairs of the index of a layer and one of its `Layer.parts`."""
        return tuple((i, part) for i in self.own for part in self.layers[i].parts)

    @functools.cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """The place of each of `entries` among them."""
        return {entry: i for i, entry in enumerate(self.entries)}

    def index_keys(self, layer: int) -> tuple[int, ...]:
        """Returns the indices of the layers whose index keys the cache stores with the latents of a layer in `own`:
        those by which this layer and all that read its latents choose tokens; () without an indexer."""
        lead, found = 0, []
        for i, other in enumerate(self.layers):
            lead = lead if other.chosen_before or other.latent is None else i
            if layer in (i, other.reads) and other.latent is not None and other.latent.indexer is not None:
                found.append(lead)
        return tuple(dict.fromkeys(found))

    @property
    def echoed(self) -> bool:
        """True if some layers use the attention weights of other layers."""
        return any(layer.echoes is not None for layer in self.layers)

    def group(self, layer: int) -> tuple[int, ...]:
        """Returns a tuple of the given layer's index and the indices of all layers that use its attention weights."""
        return (layer, *(i for i, other in enumerate(self.layers) if other.echoes == layer))

    @property
    def attending(self) -> tuple[int, ...]:
        """Indices of the layers in `own` with softmax attention, for which a cache stores keys and values."""
        return tuple(i for i in self.own if (layer := self.layers[i]).linear is None and (
            layer.recurrent is None or layer.beside))

    @property
    def summing(self) -> tuple[int, ...]:
        """Indices of the layers in `own` with linear attention, for which a cache stores a state."""
        return tuple(i for i in self.own if self.layers[i].linear is not None)

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent block, for which a cache stores a state."""
        return tuple(i for i in self.own if self.layers[i].recurrent is not None)

    @property
    def stateful(self) -> tuple[int, ...]:
        """Indices of the layers in `own` for which a cache stores a state, in place of keys and values or beside."""
        return tuple(i for i in self.own if i in self.summing or i in self.recurrent)

    @property
    def shared(self) -> bool:
        """True if some layers use the keys and values, the attention weights or the choice of tokens of others."""
        return any(layer.reading or layer.chosen_before for layer in self.layers)

    @property
    def shortcuts(self) -> bool:
        """True if the mixtures of some layers are added after the next layer."""
        return any(layer.shortcut is not None for layer in self.layers)


def llama(*, vocab: int, width: int, layers: int, heads: int, mlp: int, kv_heads: int | None = None,
          head_dim: int | None = None, context: int = 2048, theta: float = 10_000.0, eps: float = 1e-5,
          tied: bool = False) -> DecoderConfig:
    """Returns the configuration of a Llama-shaped decoder (Touvron et al., 2023), for models trained from scratch.

    Args:
        vocab: size of the vocabulary.
        width: model width `D`.
        layers: number of layers.
        heads: number of query heads.
        mlp: number of inner channels of the MLP.
        kv_heads: number of key-value heads; None: `heads`.
        head_dim: width of a head; None: `width // heads`.
        context: trained number of positions.
        theta: base of the rotary frequencies.
        eps: added to the mean square in the norms.
        tied: True uses the embedding table as the output head.

    >>> c = llama(vocab=64, width=32, layers=2, heads=4, mlp=96)
    >>> c.head_dim, len(c.layers), c.layers[0].rope.theta
    (8, 2, 10000.0)
    """
    head_dim = head_dim or width // heads
    layer = Layer(rope=Rope(width=head_dim, theta=theta))
    return DecoderConfig(vocab=vocab, width=width, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, mlp=mlp,
                         layers=(layer,) * layers, context=context, norm=NormConfig(eps=eps), tied=tied)
