"""Decoders with layers of linear attention, whose state is as large for any text: beside softmax layers, or alone.

- `linear`: any rule in any layers.
- `linearized`: "When Linear Attention Meets Autoregressive Decoding: Towards More Effective and Efficient Linearized
  Large Language Models" (You et al., 2024): grouped linear attention with a masked convolution of the values.
- `jrt`: Based and JRT-RNN, "Just read twice: closing the recall gap for recurrent language models" (Arora et al.,
  2024): Taylor features and sliding windows, and a prefix that is read in both directions.

Each gives the configuration of another network. `linearized` keeps a decoder's weights and adds to them
(`linear_weights`); how much it loses without training is in `docs/usage/models.md`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from decodax.cache import LinearRule
from decodax.models.config import DecoderConfig, Layer

Weights = dict[str, Any]


def linear(config: DecoderConfig, rule: LinearRule | None = None, layers: Sequence[int] | None = None) -> DecoderConfig:
    """With linear attention in place of softmax.

    Args:
        rule: default `elu(x) + 1`, normalised ("Transformers are RNNs", Katharopoulos et al., 2020).
        layers: which; None: all.

    Raises:
        ValueError: a layer that there is not.

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
    """The augmented linear attention of Linearized-LLM (You et al., 2024).

    Queries and keys are rotated and brought to length 1. A query sees keys of its own group with the weight
    `max(0, q k)^2`, and those of earlier groups with `q k` times a factor that each layer learns. To that is added a
    convolution over values whose kernel sees no later position. Nothing is divided by a sum of weights.

    Args:
        layers: which; None: all.
        group: positions that are counted as one group. 64 is the authors'.
        kernel: width of the convolution before the later half of it is masked, an odd number: positions up to
            `kernel // 2` before a query enter. 0: no convolution. 63 is the authors'.

    Raises:
        ValueError: sizes out of their range, or a layer that there is not.

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
    """The attention of JRT-RNN (Arora et al., 2024), or with `prefix=False` that of Based, on which it is built.

    `layers` have linear attention with Taylor features of narrow heads and no positions; the others see a sliding
    window. In `layers` an encoder with keys and values of its own reads the first tokens of a text, its prefix, and
    every query sees all of the prefix through it, those within the prefix too.

    Args:
        layers: with linear attention.
        window: positions that the other layers see.
        width: of queries and keys of linear attention.
        prefix: whether there is an encoder. A model with one takes `EncoderText` as its inputs.

    Raises:
        ValueError: a layer that there is not.

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
    """A decoder's weights with what `linearized(config)` has more of them: factors and convolutions, as zeros, with
    which the authors begin their training, too.

    Args:
        weights: of the decoder that `config` was made of.
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


def _chosen(config: DecoderConfig, layers: Sequence[int] | None) -> set[int]:
    which = set(range(len(config.layers)) if layers is None else layers)
    if which - set(range(len(config.layers))):
        raise ValueError(f"layers: got {tuple(sorted(which))}, takes numbers below {len(config.layers)}")
    return which
