"""Decoders in which all or some layers have linear attention, whose state has a constant size.

- `linear`: any rule in any layers.
- `linearized`: "When Linear Attention Meets Autoregressive Decoding: Towards More Effective and Efficient Linearized
  Large Language Models" (You et al., 2024): grouped linear attention with a masked convolution of the values.
- `jrt`: Based and JRT-RNN, "Just read twice: closing the recall gap for recurrent language models" (Arora et al.,
  2024): Taylor features and sliding windows, and a prefix with attention in both directions.

Each returns the configuration of another network. `linearized` keeps a decoder's weights and adds to them
(`linear_weights`); `docs/loading/networks.md` shows how much quality is lost without training.

Outputs are those of the authors' layers, to rounding: of `linearized` GATECH-EIC/Linearized-LLM 273274e, of `jrt`
HazyResearch/prefix-linear-attention 7490f22, whose `SlidingAttention(window_size=256)` is `window=129`. When drafts
reach into the next group, a node sees what it would see in plain decoding. Not implemented: the variants for T5,
GPT-2 and FLASH, gated short convolutions (`BaseConv`), and the prefix's masked language loss. The prefix of JRT-RNN,
the `EncoderText` of each row, is computed twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from decodax.cache import LinearRule
from decodax.core.loaded import Loaded
from decodax.models.blocks.options import Layer
from decodax.models.changes import decoder_of, with_config
from decodax.models.config import DecoderConfig

Weights = dict[str, Any]


def linear(config: DecoderConfig, rule: LinearRule | None = None, layers: Sequence[int] | None = None) -> DecoderConfig:
    """Returns a configuration with linear attention in place of softmax attention.

    Args:
        config: the network.
        rule: the rule; None: features `elu(x) + 1`, normalized ("Transformers are RNNs", Katharopoulos et al., 2020).
        layers: indices of layers; None: all.

    Raises:
        ValueError: an index is out of range.

    >>> from decodax.models import llama
    >>> c = linear(llama(vocab=64, width=32, layers=4, heads=4, mlp=96), layers=(0, 1, 3))
    >>> c.attending
    (2,)
    """
    which = _chosen(config, layers)
    rule = LinearRule() if rule is None else rule
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, linear=rule, sliding=None, scale=None) if i in which else layer
        for i, layer in enumerate(config.layers)))


def linearized(config: DecoderConfig, layers: Sequence[int] | None = None, group: int = 64,
               kernel: int = 63) -> DecoderConfig:
    """Returns a configuration with the augmented linear attention of Linearized-LLM (You et al., 2024).

    Queries and keys are rotated and normalized to length 1. A query attends to keys of its own group with the weight
    `max(0, q k)^2`, and to those of earlier groups with `q k` times a factor that each layer learns. A causal
    convolution over values is added. There is no division by a sum of weights.

    Args:
        config: the network.
        layers: indices of layers; None: all.
        group: number of positions in a group. The authors use 64.
        kernel: width of the convolution before its later half is masked, an odd number: it covers the position itself
            and `kernel // 2` earlier ones. 0: no convolution. The authors use 63.

    Raises:
        ValueError: sizes or an index are out of range.

    >>> from decodax.models import llama
    >>> c = linearized(llama(vocab=64, width=32, layers=1, heads=4, mlp=96), group=8, kernel=5)
    >>> c.layers[0].linear.group, c.layers[0].linear.taps
    (8, 3)
    """
    if group < 1 or kernel < 0 or (kernel and kernel % 2 == 0):
        raise ValueError(f"group, kernel: got {group} and {kernel}, takes 1 or more, and 0 or an odd number")
    return linear(config, LinearRule(features="identity", normalise=False, group=group,
                                     taps=kernel // 2 + 1 if kernel else 0, unit=True, factor=True), layers)


def jrt(config: DecoderConfig, layers: Sequence[int], window: int = 256, width: int = 16,
        prefix: bool = True) -> DecoderConfig:
    """Returns a configuration with the attention of JRT-RNN (Arora et al., 2024), or with `prefix=False` that of Based.

    `layers` have linear attention with Taylor features of narrow heads and no positions; the others attend to a sliding
    window. In `layers` an encoder with its own keys and values processes the first tokens of a text, its prefix. Every
    query attends to the whole prefix through it, also queries within the prefix.

    Args:
        config: the network.
        layers: indices of the layers with linear attention.
        window: number of positions to which the other layers attend.
        width: number of channels of queries and keys of linear attention.
        prefix: True adds an encoder. Such a model takes `EncoderText` as its inputs.

    Raises:
        ValueError: an index is out of range.

    >>> from decodax.models import llama
    >>> c = jrt(llama(vocab=64, width=32, layers=2, heads=4, mlp=96), layers=(0,), window=8)
    >>> [(layer.sliding, layer.linear is not None) for layer in c.layers]
    [(None, True), (8, False)]
    """
    which = _chosen(config, layers)
    own = Layer(linear=LinearRule(features="taylor", width=width, prefix=prefix))
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(own, experts=layer.experts) if i in which else dataclasses.replace(layer, sliding=window)
        for i, layer in enumerate(config.layers)))


def linear_weights(config: DecoderConfig, weights: Weights) -> Weights:
    """Returns a decoder's weights with the additional ones of `linearized(config)`: factors and convolutions.

    They are zeros, with which the authors begin their training as well.

    Args:
        config: the linearized configuration.
        weights: weights of the decoder that it was made from.
    """
    layers = dict(weights["layers"])
    for i in config.summing:
        rule, attn = config.layers[i].linear, dict(layers[str(i)]["attn"])
        assert rule is not None
        dtype = jax.tree.leaves(weights["norm"])[0].dtype
        if rule.factor:
            attn["factor"] = jnp.zeros(1, dtype)
        if rule.taps:
            attn["taps"] = jnp.zeros((config.heads, rule.taps), dtype)
        layers[str(i)] = {**layers[str(i)], "attn": attn}
    return {**weights, "layers": layers}


def with_linear_attention(lm: Loaded, layers: Sequence[int] | None = None, group: int = 64, kernel: int = 63) -> Any:
    """Returns a loaded model with the linear attention of Linearized-LLM (You et al., 2024) in some layers, for further
    training.

    The new network has the weights of the old one; the factors and convolutions of the linear attention are 0.

    Args:
        lm: the result of `decodax.load`.
        layers: indices of the layers; None: all.
        group: number of tokens in a group.
        kernel: number of tokens in a convolution; see `linearized`.

    Raises:
        ValueError: the model is not a `Transformer`, is a masked diffusion model, or has something that `linearized`
            does not support.
    """
    config = linearized(decoder_of(lm, "linear attention"), layers, group, kernel)
    return with_config(lm, config, linear_weights(config, lm.params))


def _chosen(config: DecoderConfig, layers: Sequence[int] | None) -> set[int]:
    which = set(range(len(config.layers)) if layers is None else layers)
    if which - set(range(len(config.layers))):
        raise ValueError(f"layers: got {tuple(sorted(which))}, takes numbers below {len(config.layers)}")
    return which
