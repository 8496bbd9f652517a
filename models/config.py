"""What a decoder-only transformer is made of: one hashable value that fixes shapes and options, and no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from decodax.cache import LinearRule
from decodax.common.struct import short
from decodax.models.rope import Chunks, Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""Of the MLP: `x sigmoid(x)`, the Gaussian error linear unit exactly or by its tanh form, and `max(x, 0)`."""


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """A normalisation over the last axis, computed in float32.

    Attributes:
        kind: "rms" (Zhang and Sennrich, 2019) or "layer" (Ba, Kiros and Hinton, 2016).
        eps: added to the variance.
        unit_offset: the stored scale `w` acts as `1 + w` (Gemma).
        bias: whether a bias is added.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    unit_offset: bool = False
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class Experts:
    """A sparse mixture of gated MLPs in place of one (Shazeer et al., 2017). See `decodax.models.experts`.

    Attributes:
        count: experts `E`.
        chosen: how many of them compute a token.
        width: inner width of each.
        normalise: whether the weights of the chosen ones are divided by their sum; else they are their shares of the
            softmax over all.
    """

    count: int
    chosen: int
    width: int
    normalise: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "chosen", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")
        if self.chosen > self.count:
            raise ValueError(f"chosen: got {self.chosen} of {self.count} experts")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: its attention, and its mixture of experts if it has one.

    Attributes:
        rope: rotary embedding of queries and keys; None where positions are learned, or the layer has none.
        sliding: a query sees the latest `sliding` positions, its own included; None: all.
        scale: factor of the attention scores; None: `head_dim ** -0.5`.
        experts: what stands in place of the MLP; None: the MLP.
        reads: the number of an earlier layer whose keys and values it attends to; it has no projections for its own,
            and the cache holds none of it. See `cla` and `yoco`. None: its own.
        linear: the rule of linear attention, where it has that in place of softmax: a state of constant size, and no
            scale of the scores. See `decodax.models.linear`. None: softmax.
        echoes: the number of an earlier layer whose attention it repeats, with values of its own; it has no projections
            for queries and keys, and the cache holds no keys of it. See `echo_att`. None: its own.
    """

    rope: Rope | None = None
    sliding: int | None = None
    scale: float | None = None
    experts: Experts | None = None
    reads: int | None = None
    linear: LinearRule | None = None
    echoes: int | None = None

    def __post_init__(self) -> None:
        if self.sliding is not None and self.sliding < 1:
            raise ValueError(f"sliding: got {self.sliding}, takes 1 or more, or None")
        if self.linear is not None and (self.sliding is not None or self.scale is not None or self.reads is not None):
            raise ValueError("linear: got a rule beside a sliding window, a scale or another layer's keys, takes none")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape and options of a decoder. Defaults are Llama's.

    Attributes:
        vocab: vocabulary size `V`.
        width: model width `D`.
        heads, kv_heads: query heads `H` and key/value heads `G`; `H` is a multiple of `G`.
        value_heads: heads of values, a multiple of `kv_heads` and a divisor of `heads`; None: `kv_heads`.
        head_dim: width `d` of a head.
        mlp: inner width of the MLP.
        layers: one entry a layer.
        context: positions the model was made for (`max_position_embeddings`).
        norm: every norm over the width.
        block: where the norms of a block stand: "pre" (before attention and MLP), "post" (after each, inside the
            residual branch: OLMo 2), "sandwich" (both: Gemma 2), "parallel" (one norm feeds both branches: StableLM,
            Phi-2, Cohere).
        qk_norm: norm of queries and keys before rotation: over each head with one scale for all heads ("head"), over
            all heads together ("full"), over each head with its own scale ("per_head"), or None.
        qk_norm_kind: its norm; None: the same as `norm`.
        activation: of the MLP.
        gated: `down(act(gate(x)) * up(x))` rather than `down(act(up(x)))`.
        qkv_bias, out_bias, mlp_bias: which projections have a bias.
        learned_positions: rows of the learned position embedding; 0: none.
        tied: the output head is the embedding.
        head_bias: whether an output head of its own has a bias.
        attention_softcap, logit_softcap: `cap * tanh(x / cap)` on scores and on logits (Gemma 2).
        embed_scale, residual_scale, logit_scale: factors of embeddings, of each residual branch, and of logits.
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
    qk_norm: Literal["head", "full", "per_head"] | None = None
    qk_norm_kind: NormConfig | None = None
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    learned_positions: int = 0
    tied: bool = False
    head_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    value_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "heads", "kv_heads", "head_dim", "mlp", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")
        if not self.layers:
            raise ValueError("layers: got none")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: got {self.heads}, which is not a multiple of kv_heads = {self.kv_heads}")
        if self.value_heads is not None and (self.value_heads < 1 or self.value_heads % self.kv_heads
                                             or self.heads % self.value_heads):
            raise ValueError(f"value_heads: got {self.value_heads}, takes a multiple of kv_heads = {self.kv_heads} "
                             f"that divides heads = {self.heads}")
        if self.echoed and any(layer.reads is not None or layer.linear is not None for layer in self.layers):
            raise ValueError("echoes: got layers that repeat the attention of others beside some that read their keys "
                             "and values, or have linear attention; takes one of these")
        if self.tied and self.head_bias:
            raise ValueError("head_bias: got True, a tied head takes False")
        for i, layer in enumerate(self.layers):
            if layer.reads is not None and not (0 <= layer.reads < i and self.layers[layer.reads].reads is None
                                                and self.layers[layer.reads].linear is None
                                                and self.layers[layer.reads].rope == layer.rope):
                raise ValueError(f"reads: got {layer.reads} for layer {i}, takes an earlier layer with keys and values "
                                 "of its own, and the same rope")
            if layer.echoes is not None and not (
                    0 <= layer.echoes < i and layer.reads is None and self.layers[layer.echoes].echoes is None
                    and self.layers[layer.echoes].sliding == layer.sliding):
                raise ValueError(f"echoes: got {layer.echoes} for layer {i}, takes an earlier layer with attention of "
                                 "its own, and the same sliding window")
            if layer.rope is not None and layer.rope.chunks is not None and (
                    layer.sliding is not None or self.attention_softcap is not None):
                raise ValueError("chunks: got dual chunk attention beside a sliding window or a soft cap of the "
                                 "scores, takes neither")
            if layer.linear is not None and (self.attention_softcap is not None or self.values_of_key > 1 or (
                    layer.rope is not None and layer.rope.chunks is not None)):
                raise ValueError("linear: got a rule beside a soft cap of the scores, value_heads or dual chunk "
                                 "attention, takes none")
            if layer.linear is not None and layer.linear.width is not None and self.qk_norm is not None:
                raise ValueError("linear: got a width of its own beside qk_norm, takes one of them")
            if layer.rope is not None and layer.rope.width > self.key_width(layer):
                raise ValueError(f"rope width: got {layer.rope.width}, more than head_dim = {self.key_width(layer)}")
            if layer.experts is not None and (not self.gated or self.mlp_bias):
                raise ValueError("experts: got some beside an MLP that is not gated or has biases; experts are gated "
                                 "and have none")

    @property
    def values_of_key(self) -> int:
        """Heads of values that share a head of keys."""
        return 1 if self.value_heads is None else self.value_heads // self.kv_heads

    def key_width(self, layer: Layer) -> int:
        """The width of a layer's queries and keys."""
        linear = layer.linear
        return self.head_dim if linear is None or linear.width is None else linear.width

    @property
    def own(self) -> tuple[int, ...]:
        """The layers with keys of their own, of which a cache holds something."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.reads is None and layer.echoes is None)

    @property
    def echoed(self) -> bool:
        """Whether some layers repeat the attention of others."""
        return any(layer.echoes is not None for layer in self.layers)

    def group(self, layer: int) -> tuple[int, ...]:
        """A layer with attention of its own, and those that repeat it."""
        return (layer, *(i for i, other in enumerate(self.layers) if other.echoes == layer))

    @property
    def attending(self) -> tuple[int, ...]:
        """Those of them whose keys and values a cache holds: with softmax."""
        return tuple(i for i in self.own if self.layers[i].linear is None)

    @property
    def summing(self) -> tuple[int, ...]:
        """Those of them of which a cache holds a state: with linear attention."""
        return tuple(i for i in self.own if self.layers[i].linear is not None)

    @property
    def shared(self) -> bool:
        """Whether some layers read or repeat those of others."""
        return len(self.own) < len(self.layers)


def in_chunks(layers: tuple[Layer, ...], chunks: Chunks | None) -> tuple[Layer, ...]:
    """Layers whose rotary embeddings, where they have one, count positions in chunks."""
    return tuple(layer if layer.rope is None else
                 dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, chunks=chunks)) for layer in layers)


def cla(config: DecoderConfig, share: int = 2) -> DecoderConfig:
    """With keys and values of every `share`-th layer alone, which the layers behind it read ("Reducing Transformer
    Key-Value Cache Size with Cross-Layer Attention", Brandon et al., 2024): a cache of a `share`-th of the size. It is
    another network, to be trained as such.

    >>> [layer.reads for layer in cla(llama(vocab=64, width=32, layers=4, heads=4, mlp=96)).layers]
    [None, 0, None, 2]
    """
    if share < 1:
        raise ValueError(f"share: got {share}, takes 1 or more")
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, reads=i - i % share if i % share else None)
        for i, layer in enumerate(config.layers)))


def yoco(config: DecoderConfig, window: int = 1024) -> DecoderConfig:
    """A decoder-decoder ("You Only Cache Once: Decoder-Decoder Architectures for Language Models", Sun et al., 2024):
    the first half of the layers see a sliding `window`, and all of the second half read the keys and values that its
    first one makes of the whole text. It is the form with sliding windows, not that with gated retention; another
    network, to be trained as such.

    >>> c = yoco(llama(vocab=64, width=32, layers=4, heads=4, mlp=96), window=16)
    >>> [(layer.sliding, layer.reads) for layer in c.layers]
    [(16, None), (16, None), (None, None), (None, 2)]
    """
    half = len(config.layers) // 2
    if half < 1:
        raise ValueError("layers: got one, takes two or more")
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, sliding=window if i < half else None, reads=half if i > half else None)
        for i, layer in enumerate(config.layers)))


def echo_att(config: DecoderConfig, groups: Sequence[Sequence[int]]) -> DecoderConfig:
    """With groups of layers that attend as the first of each does ("EchoAtt: Attend, Copy, then Adjust for More
    Efficient Large Language Models", Rajabzadeh et al., 2024): the others have values of their own, and neither queries
    nor keys. It is another network, to be distilled as such: `decodax.train.echo_att`.

    >>> c = echo_att(llama(vocab=64, width=32, layers=6, heads=4, mlp=96), [(1, 2), (3, 4)])
    >>> [layer.echoes for layer in c.layers]
    [None, None, 1, None, 3, None]
    """
    flat = [i for group in groups for i in group]
    if len(set(flat)) < len(flat) or any(list(group) != sorted(group) or not group for group in groups) or not (
            all(0 <= i < len(config.layers) for i in flat)):
        raise ValueError(f"groups: got {tuple(map(tuple, groups))}, takes groups of the {len(config.layers)} layers, "
                         "each in their order, and a layer in one of them")
    lead = {i: group[0] for group in groups for i in group[1:]}
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, echoes=lead.get(i)) for i, layer in enumerate(config.layers)))


def diffqkv(config: DecoderConfig, key_heads: int) -> DecoderConfig:
    """With fewer heads of keys than of values ("Sigma: Differential Rescaling of Query, Key and Value for Efficient
    Language Models", Lin et al., 2025), since a model misses keys less: of Sigma's DiffQKV the numbers of heads.
    Queries that are wider than the model are `heads * head_dim > width`. It is another network, to be trained as such.

    >>> c = diffqkv(llama(vocab=64, width=32, layers=1, heads=8, kv_heads=4, mlp=96), key_heads=2)
    >>> c.kv_heads, c.value_heads
    (2, 4)
    """
    if key_heads < 1 or config.kv_heads % key_heads:
        raise ValueError(f"key_heads: got {key_heads}, takes a divisor of kv_heads = {config.kv_heads}")
    return dataclasses.replace(config, kv_heads=key_heads, value_heads=config.kv_heads)


def llama(*, vocab: int, width: int, layers: int, heads: int, mlp: int, kv_heads: int | None = None,
          head_dim: int | None = None, context: int = 2048, theta: float = 10_000.0, eps: float = 1e-5,
          tied: bool = False) -> DecoderConfig:
    """A Llama-shaped decoder (Touvron et al., 2023), for models trained from scratch.

    >>> c = llama(vocab=64, width=32, layers=2, heads=4, mlp=96)
    >>> c.head_dim, len(c.layers), c.layers[0].rope.theta
    (8, 2, 10000.0)
    """
    head_dim = head_dim or width // heads
    layer = Layer(rope=Rope(width=head_dim, theta=theta))
    return DecoderConfig(vocab=vocab, width=width, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, mlp=mlp,
                         layers=(layer,) * layers, context=context, norm=NormConfig(eps=eps), tied=tied)
