"""Collects the keys (before their rotation) and values of texts in each layer, to which codecs and maps are fitted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer
from decodax.caches.prefill.listening import Listening
from decodax.caches.rotation import before_rotation
from decodax.caches.shapes import layers_of
from decodax.common.struct import Struct, struct
from decodax.core.loaded import network_of
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.train.fitting import padded


@struct
class LayerSamples(Struct):
    """The keys (before their rotation) and values of one layer, for all tokens of all texts.

    Attributes:
        keys: `f32[N, G, d]`.
        values: `f32[N, G, e]`.
        key_weights: `f32[N, G, d]`, weights of the numbers in `keys`: the squared gradients of the loss on the next
            tokens (the diagonal of the Fisher information), or ones.
        value_weights: `f32[N, G, e]`, weights of the numbers in `values`, likewise.
    """

    keys: np.ndarray
    values: np.ndarray
    key_weights: np.ndarray
    value_weights: np.ndarray


def observed(lm: Any, texts: Sequence[Sequence[int]], params: Any = None,
             gradients: bool = False) -> list[LayerSamples]:
    """Returns the keys and values of texts in each layer.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids.
        params: the weights of a bare `Model`.
        gradients: True weights the numbers by squared gradients.

    Raises:
        ValueError: no texts, or a text of fewer than two tokens.
    """
    if not texts:
        raise ValueError("texts: got none, takes at least one")
    model, weights = network_of(lm, params)
    shapes = layers_of(model)
    rows: list[list[tuple[np.ndarray, ...]]] = [[] for _ in shapes]
    for text in texts:
        if (length := len(text)) < 2:
            raise ValueError(f"texts: got one of {length} tokens, takes 2 or more")
        found = _listen(model, tuple(shapes), gradients, weights, padded([text]), np.int32(length))
        for layer, parts in enumerate(found):
            rows[layer].append(tuple(np.asarray(x)[:length] for x in parts))
    return [LayerSamples(*(np.concatenate(part) for part in zip(*layer, strict=True))) for layer in rows]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _listen(model: Model, shapes: tuple[KVLayer, ...], gradients: bool, params: Any, tokens: Array,
            length: Array) -> list[tuple[Array, ...]]:
    n = tokens.shape[1]
    live = jnp.arange(n)[None] < length
    window = causal(tokens, jnp.zeros(1, jnp.int32), live)

    def loss(added: Any) -> tuple[Array, Any]:
        out = model.apply(params, window, Listening(added=added))
        logp = jax.nn.log_softmax(out.logits()[:, :-1], -1)
        own = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
        return -jnp.where(live[:, 1:], own, 0).sum(), out.entries

    none: Any = ()
    if gradients:
        none = tuple(KVEntry(jnp.zeros((1, n, s.heads, s.width)), jnp.zeros((1, n, s.heads, s.both - s.width)))
                     for s in shapes)
        slopes, entries = jax.grad(loss, has_aux=True)(none)
    else:
        _, entries = loss(none)
        slopes = jax.tree.map(jnp.ones_like, entries)
    back = lambda shape, x: before_rotation(shape, x[0].astype(jnp.float32).swapaxes(0, 1), jnp.int32(0)).swapaxes(0, 1)
    # gradients turn as keys do, since a rotation is orthogonal
    made: list[tuple[Array, ...]] = []
    for shape, own, slope in zip(shapes, entries, slopes, strict=True):
        weigh = jnp.square if gradients else jnp.ones_like
        made.append((back(shape, own.keys), own.values[0].astype(jnp.float32), weigh(back(shape, slope.keys)),
                     weigh(slope.values[0])))
    return made
