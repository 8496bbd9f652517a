"""The configuration of an encoder-decoder: one hashable value that fixes shapes and options, without weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax.models.config import Activation, NormConfig


@dataclasses.dataclass(frozen=True)
class RelativePositions:
    """Positions as a bias of the scores of self-attention that depends only on the distance (Raffel et al., 2020).

    Attributes:
        buckets: number of buckets of distances, each with a bias for every head.
        farthest: distance from which on all distances share a bucket.
    """

    buckets: int = 32
    farthest: int = 128


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """Positions as rows of a learned table, added to the embeddings.

    Attributes:
        count: number of positions.
        offset: row of position 0; the rows before it are not used.
    """

    count: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Sinusoids:
    """Positions as sines, then cosines, added to the embeddings (Vaswani et al., 2017). They are computed, not stored.

    Attributes:
        count: number of positions that the model was trained on.
        steps: the frequency of channel `i` is `10000 ** (-i / steps)`.
        offset: added to each position.
    """

    count: int
    steps: int
    offset: int = 0


Positions = RelativePositions | LearnedPositions | Sinusoids


@dataclasses.dataclass(frozen=True)
class Stack:
    """The shape of the encoder or of the decoder.

    Attributes:
        layers: number of layers.
        heads: number of heads `H`.
        head_dim: number of channels `d` of a head.
        mlp: number of inner channels of the MLP.
        positions: how positions enter.
    """

    layers: int
    heads: int
    head_dim: int
    mlp: int
    positions: Positions


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """The shape and options of an encoder-decoder. Defaults are those of BART.

    Attributes:
        vocab: vocabulary size `V` of the decoder.
        width: model width `D`.
        encoder: shape of the encoder.
        decoder: shape of the decoder.
        norm: the norm of all layers.
        pre_norm: True normalises the input of attention and MLP, and the output of each stack. False normalises the sum
            of their input and output.
        embed_norm: True normalises the embeddings, positions included.
        bias: True gives all projections biases.
        key_bias: False leaves out the bias of keys.
        activation: activation function of the MLP.
        gated: True for a gated MLP.
        scale: factor of attention scores; None: `head_dim ** -0.5`.
        embed_scale: factor of embeddings.
        head_scale: factor of hidden states before the output head.
        tied: True uses the decoder's embedding table as the output head.
        source_vocab: vocabulary size of an embedding table of the encoder's own; None: the encoder uses the decoder's
            table, or reads audio.
        logits_bias: True adds a bias to the logits.
        features: number of features of a frame, for an encoder of audio, which shortens them by two convolutions; None:
            an encoder of text.
    """

    vocab: int
    width: int
    encoder: Stack
    decoder: Stack
    norm: NormConfig = NormConfig("layer", 1e-5, bias=True)
    pre_norm: bool = False
    embed_norm: bool = True
    bias: bool = True
    key_bias: bool = True
    activation: Activation = "gelu"
    gated: bool = False
    scale: float | None = None
    embed_scale: float = 1.0
    head_scale: float = 1.0
    tied: bool = True
    source_vocab: int | None = None
    logits_bias: bool = False
    features: int | None = None


def t5(vocab: int, width: int, heads: int, head_dim: int, mlp: int, encoder: int, decoder: int, *,
       positions: RelativePositions = RelativePositions(), eps: float = 1e-6, scaled: bool = True,
       **options: Any) -> EncoderDecoderConfig:
    """Returns a T5 (Raffel et al., 2020). Defaults are those of version 1.0.

    Args:
        vocab: vocabulary size `V`.
        width: model width `D`.
        heads: number of heads.
        head_dim: number of channels of a head.
        mlp: number of inner channels of the MLP.
        encoder: number of layers of the encoder.
        decoder: number of layers of the decoder.
        positions: the relative positions of both stacks.
        eps: added to the variance in norms.
        scaled: True multiplies hidden states by `D ** -0.5` before the head.
        options: further fields of `EncoderDecoderConfig`.
    """
    stack = lambda layers: Stack(layers, heads, head_dim, mlp, positions)
    return EncoderDecoderConfig(vocab, width, stack(encoder), stack(decoder), **{
        "norm": NormConfig(eps=eps), "pre_norm": True, "embed_norm": False, "bias": False, "activation": "relu",
        "scale": 1.0, "head_scale": width ** -0.5 if scaled else 1.0, **options})
