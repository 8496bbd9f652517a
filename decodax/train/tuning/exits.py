"""Losses after each layer of a text, through the final norm and the head that all exits of a model share."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.types import Out
from decodax.core.window import causal
from decodax.train.fixed_depth import check_whole_layers
from decodax.train.language_model import cross_entropy

Tree = Any


def text_output(network: Any, params: Tree, tokens: Array, keep: Array | None = None) -> Out:
    """Returns the network's output for texts `i32[B, T]`, with the residual stream after each layer.

    Args:
        network: a network that returns the residual stream after each layer.
        params: its weights.
        tokens: the texts.
        keep: `bool[B, L]`, the layers that run in each row; None: all.

    Raises:
        ValueError: a layer adds what another one computed (`shortcut`), so the model cannot end between them.
    """
    check_whole_layers(network.config)
    cache = network.init_cache(tokens.shape[0], 0)
    window = causal(tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    return network.apply(params, window, cache, *(() if keep is None else (keep,)))


def exit_loss(out: Out, layer: int, targets: Array, learned: Array) -> Array:
    """Returns the mean cross-entropy of next tokens, `f32[]` in nats, if the network ends after some of its layers.

    Args:
        out: the output of `text_output`.
        layer: number of layers that run, from 1.
        targets: `i32[B, T]`, the next tokens.
        learned: `bool[B, T]`, True for next tokens that count.

    Raises:
        ValueError: the network's layers have no final norm of their own.
    """
    assert out.layers is not None
    hidden = out.hidden if layer == len(out.layers) else out.normed(out.layers[layer - 1])
    return learned_mean(cross_entropy(out.head(hidden), targets), learned)


def learned_mean(losses: Array, learned: Array) -> Array:
    """Returns the mean of the losses (`f32[B, T]`) at the positions in `learned` (`bool[B, T]`); 0 if there are none.
    """
    return jnp.where(learned, losses, 0).sum() / jnp.maximum(learned.sum(), 1)


@partial(jax.jit, static_argnames=("network",))
def losses_by_layer(network: Any, params: Tree, batch: tuple[Array, Array]) -> Array:
    """Returns the mean cross-entropy of next tokens, `f32[L]` in nats, of the network cut after 1 to `L` of its layers
    (`exit_loss`). `batch` has tokens, `i32[B, T + 1]`, and True for those that count, `bool[B, T + 1]`."""
    tokens, learned = batch
    out = text_output(network, params, tokens[:, :-1])
    assert out.layers is not None
    return jnp.stack([exit_loss(out, i + 1, tokens[:, 1:], learned[:, 1:]) for i in range(len(out.layers))])


__all__ = ["exit_loss", "learned_mean", "losses_by_layer", "text_output"]
