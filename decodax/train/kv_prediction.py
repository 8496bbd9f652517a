"""Trains the linear maps of KV Prediction and the auxiliary model whose cache they use (Horton et al., 2024).

The paper trains the auxiliary model and the maps together; the target model does not change. The loss is a sum of three
terms: the loss of the target model on predicted keys and values, the loss of the auxiliary model, and the absolute
error of keys and values, averaged in each layer and added over layers (consistency). Here training starts from the maps
with the smallest squared error, which have a closed form. `fit_kv_prediction` does not change the auxiliary model and
uses the first and third term; `train_kv_prediction` uses all three.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer
from decodax.caches.prefill.kv_prediction import KVMaps, both_layers, placed
from decodax.caches.prefill.listening import Listening, Passing
from decodax.caches.rotation import turned
from decodax.common.struct import struct
from decodax.core.cache import PyTree
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention
from decodax.train.aqua_kv import ridge
from decodax.train.fitting import padded, shuffled, train
from decodax.train.samples import observed


@struct
class InPlace(Passing):
    """A cache that stores nothing: queries attend to given keys and values of the window in place of the layer's own.

    Attributes:
        kv: rotated keys `f[B, W, G, d]` and values `f[B, W, G, e]` for each layer.
    """

    kv: tuple[KVEntry, ...]

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None, sinks: Array | None = None
              ) -> tuple[Array, PyTree]:
        given = self.kv[layer]
        keys, values = given.keys.astype(k.dtype), given.values.astype(v.dtype)
        return window_attention(q, keys, values, window.visible(), window.positions, scale=scale, sliding=sliding,
                                softcap=softcap, bias=bias, sinks=sinks), ()


def auxiliary_layers(count: int, auxiliary: int) -> tuple[int, ...]:
    """Returns the index of the auxiliary layer from which each of `count` layers is predicted.

    The indices ascend. Each of the `auxiliary` layers predicts the same number of layers, and the first ones predict
    one more if `count` is not divisible.

    >>> auxiliary_layers(7, 5), auxiliary_layers(4, 2)
    ((0, 0, 1, 1, 2, 3, 4), (0, 0, 1, 1))
    """
    times, more = divmod(count, auxiliary)
    return tuple(i for i in range(auxiliary) for _ in range(times + (i < more)))


def fit_kv_prediction(lm: Any, auxiliary: Any, texts: Sequence[Sequence[int]], layers: Sequence[int] | None = None,
                      damping: float = 1e-3, steps: int = 0, rate: float = 1e-3, consistency: float = 1.0,
                      base: float = 1.0, seed: int = 0) -> KVMaps:
    """Fits linear maps from the cache of an auxiliary model to that of the target model; both models do not change.

    Args:
        lm: the target model, a result of `decodax.load`.
        auxiliary: a smaller model with the same tokenizer.
        texts: token ids of texts similar to later ones.
        layers: index of the auxiliary layer from which each layer is predicted; None: as in the paper, see
            `auxiliary_layers`.
        damping: damping of the least squares; see `decodax.train.aqua_kv.ridge`.
        steps: number of training steps after the least squares, by Adam with one text in each step; needs optax
            (`decodax[train]`).
        rate: initial learning rate, which falls to a tenth.
        consistency: weight of the absolute error of the prediction.
        base: weight of the loss of the target model on the next token, with predicted keys and values.
        seed: seed of the order of texts.

    Returns:
        The option `maps` of `decodax.caches.kv_prediction`.

    Raises:
        ValueError: no texts, models that do not fit each other, or `layers` with an index that does not exist.
    """
    if steps < 0:
        raise ValueError(f"steps: got {steps}, takes 0 or more")
    maps = _least_squares(lm, auxiliary, texts, layers, damping)
    return _trained(lm, auxiliary, maps, texts, steps, rate, (consistency, base, 0.0), seed)[0] if steps else maps


def train_kv_prediction(lm: Any, auxiliary: Any, texts: Sequence[Sequence[int]], layers: Sequence[int] | None = None,
                        damping: float = 1e-3, steps: int = 1000, rate: float = 1e-3, consistency: float = 1.0,
                        base: float = 1.0, own: float = 1.0, seed: int = 0, progress: bool = False
                        ) -> tuple[KVMaps, Any]:
    """Trains the linear maps together with the auxiliary model; the target model does not change. Needs optax
    (`decodax[train]`).

    Args:
        lm: the target model, a result of `decodax.load`.
        auxiliary: a smaller model with the same tokenizer.
        texts: token ids of texts similar to later ones.
        layers: index of the auxiliary layer from which each layer is predicted; None: see `auxiliary_layers`.
        damping: damping of the initial least squares; see `decodax.train.aqua_kv.ridge`.
        steps: number of training steps, by Adam with one text in each step.
        rate: initial learning rate, which falls to a tenth.
        consistency: weight of the absolute error of the prediction.
        base: weight of the loss of the target model on the next token, with predicted keys and values.
        own: weight of the loss of the auxiliary model on the next token. The weights are 1 in the paper.
        seed: seed of the order of texts.
        progress: True shows a progress bar.

    Returns:
        The options `maps` and `auxiliary` (with new weights) of `decodax.caches.kv_prediction`.

    Raises:
        ValueError: as in `fit_kv_prediction`, no steps, or an auxiliary model whose weights are not floating-point
            numbers.
    """
    if steps < 1:
        raise ValueError(f"steps: got {steps}, takes 1 or more")
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(auxiliary.params)):
        raise ValueError("auxiliary: got weights that are no floating point numbers, takes those as they were loaded, "
                         "without a format of fewer bits")
    maps = _least_squares(lm, auxiliary, texts, layers, damping)
    maps, params = _trained(lm, auxiliary, maps, texts, steps, rate, (consistency, base, own), seed, progress)
    return maps, dataclasses.replace(auxiliary, params=params)


def _least_squares(lm: Any, auxiliary: Any, texts: Sequence[Sequence[int]], layers: Sequence[int] | None,
                   damping: float) -> KVMaps:
    of, to = both_layers(lm, auxiliary)
    which = auxiliary_layers(len(to), len(of)) if layers is None else tuple(map(int, layers))
    if len(which) != len(to) or not all(0 <= i < len(of) for i in which):
        raise ValueError(f"layers: got {which}, takes for each of {len(to)} layers one of the {len(of)} of the "
                         "auxiliary model")
    wanted, given = observed(lm, texts), observed(auxiliary, texts)
    flat = lambda x: x.reshape(len(x), -1)
    keys = tuple(jnp.asarray(ridge(flat(given[i].keys), flat(own.keys), damping))
                 for i, own in zip(which, wanted, strict=True))
    values = tuple(jnp.asarray(ridge(flat(given[i].values), flat(own.values), damping))
                   for i, own in zip(which, wanted, strict=True))
    return KVMaps(keys=keys, values=values, layers=which)


def _trained(lm: Any, auxiliary: Any, maps: KVMaps, texts: Sequence[Sequence[int]], steps: int, rate: float,
             weigh: tuple[float, float, float], seed: int, progress: bool = False) -> tuple[KVMaps, PyTree]:
    """Returns the trained maps, and the weights of the auxiliary model, which change only if its loss has a weight."""
    import optax  # only for those who train

    of, to = both_layers(lm, auxiliary)
    adam = optax.chain(optax.clip_by_global_norm(1.0),
                       optax.adam(optax.cosine_decay_schedule(rate, steps, 0.1), b1=0.9, b2=0.95))

    def loss(trained: tuple[KVMaps, PyTree], params: tuple[PyTree, PyTree], tokens: Array, length: Array) -> Array:
        maps, other = trained
        each = losses(lm.model, auxiliary.model, of, to, (params[0], params[1] if other is None else other), maps,
                      tokens, length)
        return jnp.stack([w * x for w, x in zip(weigh, each, strict=True) if w]).sum()

    every, lengths = padded(texts), np.array(list(map(len, texts)), np.int32)
    batches = (((lm.params, auxiliary.params), every[rows], lengths[rows[0]])
               for rows in shuffled(len(texts), 1, np.random.default_rng(seed)))
    (maps, params), _ = train(loss, (maps, auxiliary.params if weigh[2] else None), batches, adam, steps,
                              progress and "training the maps")
    return maps, auxiliary.params if params is None else params


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def losses(model: Model, auxiliary: Model, of: tuple[KVLayer, ...], to: tuple[KVLayer, ...], params: tuple[Any, Any],
           maps: KVMaps, tokens: Array, length: Array) -> tuple[Array, Array, Array]:
    """Computes the three terms of the loss of `train_kv_prediction` for the first `length` (`i32[]`) of the tokens
    `i32[1, N]`. `of` and `to` are the KV layers of the auxiliary and the target model, `params` the weights of (target,
    auxiliary).

    Returns:
        The absolute error of the prediction, the loss of the target model, and the loss of the auxiliary model, each
        `f32[]`.
    """
    live = jnp.arange(tokens.shape[1])[None] < length
    window = causal(tokens, jnp.zeros(1, jnp.int32), live)
    own, other = params
    read = auxiliary.apply(other, window, Listening())
    made = maps.predicted(of, to, read.entries, window.positions)
    wanted = model.apply(own, window, Listening()).entries
    error = jnp.float32(0)
    for shape, true, guess in zip(to, wanted, made, strict=True):
        for x, y in ((turned(shape, true.keys.astype(jnp.float32), -window.positions), guess.keys),
                     (true.values.astype(jnp.float32), guess.values)):
            error += jnp.where(live, jnp.abs(x - y).mean((2, 3)), 0).sum() / length
    out = model.apply(own, window, InPlace(kv=tuple(placed(to, made, window.positions))))

    def next_token(logits: Array) -> Array:
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1], -1), tokens[:, 1:, None], -1)[..., 0]
        return -jnp.where(live[:, 1:], logp, 0).sum() / jnp.maximum(length - 1, 1)

    return error, next_token(out.logits()), next_token(read.logits())
