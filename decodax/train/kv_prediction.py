"""The maps of KV Prediction, and the auxiliary model that they read (Horton et al., 2024).

The paper trains the auxiliary model and the maps together, with the model that answers as it is, by the sum of three
losses: that of the model that answers, where all that it attends to is predicted; that of the auxiliary model; and the
absolute error of keys and values, averaged in each layer and added over layers (consistency). Both begin here with the
maps of least squared error, which have a closed form. `fit_kv_prediction` leaves the auxiliary model as it is, and has
the first loss and the third; `train_kv_prediction` has all of it.
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

from decodax.cache.key_values import KVLayer
from decodax.caches.prefill.kv_prediction import KVMaps, both_layers, placed
from decodax.caches.prefill.listening import Listening, Passing
from decodax.caches.rotation import turned
from decodax.common.progress import bar
from decodax.common.struct import struct
from decodax.core.cache import PyTree
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention
from decodax.train.codecs import observed
from decodax.train.predicted import ridge


@struct
class InPlace(Passing):
    """A cache that holds nothing: attention within a window, to given keys and values in place of its own.

    Attributes:
        kv: of each layer keys `f[B, W, G, d]`, rotated, and values `f[B, W, G, e]`.
    """

    kv: tuple[tuple[Array, Array], ...]

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None) -> tuple[Array, PyTree]:
        keys, values = (given.astype(own.dtype) for given, own in zip(self.kv[layer], (k, v), strict=True))
        return window_attention(q, keys, values, window.visible(), window.positions, scale=scale, sliding=sliding,
                                softcap=softcap, bias=bias), ()


def auxiliary_layers(count: int, auxiliary: int) -> tuple[int, ...]:
    """From which of so many auxiliary layers each of `count` layers is predicted: in their order, equally many from
    each, and where that does not come out even one more from each of the first ones.

    >>> auxiliary_layers(7, 5), auxiliary_layers(4, 2)
    ((0, 0, 1, 1, 2, 3, 4), (0, 0, 1, 1))
    """
    times, more = divmod(count, auxiliary)
    return tuple(i for i in range(auxiliary) for _ in range(times + (i < more)))


def fit_kv_prediction(lm: Any, auxiliary: Any, texts: Sequence[Sequence[int]], layers: Sequence[int] | None = None,
                      damping: float = 1e-3, steps: int = 0, rate: float = 1e-3, consistency: float = 1.0,
                      base: float = 1.0, seed: int = 0) -> KVMaps:
    """Maps from the cache of an auxiliary model to that of the model that answers, both of which stay as they are.

    Args:
        lm, auxiliary: two models with the same tokenizer, as `decodax.load` gives them.
        texts: token ids of texts like those to come.
        layers: from which auxiliary layer each layer is predicted; None: as in the paper, see `auxiliary_layers`.
        damping: of the least squares, see `decodax.train.predicted.ridge`.
        steps: of training behind that, by Adam with one text a step, which takes optax (`decodax[train]`); 0: none.
        rate: of the first steps, from which it falls to a tenth. seed: of the order of texts.
        consistency, base: weights of the two losses: the absolute error of what is predicted, and the loss on the next
            token of a model that attends to nothing else.

    Returns:
        What `decodax.caches.make("kv-prediction", maps=...)` takes.

    Raises:
        ValueError: no texts, models that do not go together, or layers that there are none of.
    """
    if steps < 0:
        raise ValueError(f"steps: got {steps}, takes 0 or more")
    maps = _least_squares(lm, auxiliary, texts, layers, damping)
    return _trained(lm, auxiliary, maps, texts, steps, rate, (consistency, base, 0.0), seed)[0] if steps else maps


def train_kv_prediction(lm: Any, auxiliary: Any, texts: Sequence[Sequence[int]], layers: Sequence[int] | None = None,
                        damping: float = 1e-3, steps: int = 1000, rate: float = 1e-3, consistency: float = 1.0,
                        base: float = 1.0, own: float = 1.0, seed: int = 0, progress: bool = False
                        ) -> tuple[KVMaps, Any]:
    """Maps from the cache of an auxiliary model to that of the model that answers, and the auxiliary model, which is
    trained with them; the model that answers stays as it is. It takes optax (`decodax[train]`).

    Args:
        lm, auxiliary, texts, layers, damping, steps, rate, seed: see `fit_kv_prediction`.
        consistency, base, own: weights of the three losses: the absolute error of what is predicted, the loss on the
            next token of a model that attends to nothing else, and that of the auxiliary model. The paper adds them up.
        progress: shows a progress bar.

    Returns:
        The maps, and `auxiliary` with new weights: what `decodax.caches.make("kv-prediction", maps=...,
                                                                              auxiliary=...)` takes.

    Raises:
        ValueError: as `fit_kv_prediction`, no steps, or an auxiliary model whose weights are no floating point numbers.
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
    """The maps and the weights of the auxiliary model, which change where its loss has a weight."""
    import optax  # only for those who train

    of, to = both_layers(lm, auxiliary)
    adam = optax.chain(optax.clip_by_global_norm(1.0),
                       optax.adam(optax.cosine_decay_schedule(rate, steps, 0.1), b1=0.9, b2=0.95))

    @jax.jit
    def step(trained: tuple[KVMaps, PyTree], state: Any, params: tuple[PyTree, PyTree], tokens: Array,
             length: Array) -> tuple[tuple[KVMaps, PyTree], Any]:
        def loss(trained: tuple[KVMaps, PyTree]) -> Array:
            maps, other = trained
            each = losses(lm.model, auxiliary.model, of, to, (params[0], params[1] if other is None else other), maps,
                          tokens, length)
            return jnp.stack([w * x for w, x in zip(weigh, each, strict=True) if w]).sum()

        change, state = adam.update(jax.grad(loss)(trained), state, trained)
        return optax.apply_updates(trained, change), state

    trained = maps, auxiliary.params if weigh[2] else None
    state, size = adam.init(trained), -(-max(map(len, texts)) // 64) * 64
    random, order = np.random.default_rng(seed), []         # type: ignore[var-annotated]
    while len(order) < steps:
        order += random.permutation(len(texts)).tolist()
    with bar(progress, "training the maps", steps) as report:
        for i, which in enumerate(order[:steps]):
            tokens = np.zeros((1, size), np.int32)
            tokens[0, :len(texts[which])] = texts[which]
            trained, state = step(trained, state, (lm.params, auxiliary.params), tokens, np.int32(len(texts[which])))
            report(i + 1)
    return trained[0], auxiliary.params if trained[1] is None else trained[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def losses(model: Model, auxiliary: Model, of: tuple[KVLayer, ...], to: tuple[KVLayer, ...], params: tuple[Any, Any],
           maps: KVMaps, tokens: Array, length: Array) -> tuple[Array, Array, Array]:
    """The three losses of `train_kv_prediction` on the first `length` (`i32[]`) of the tokens `i32[1, N]`, `f32[]`: the
    absolute error of what is predicted, averaged over a layer's keys or values and added up, the loss on the next
    token, and that of the auxiliary model."""
    live = jnp.arange(tokens.shape[1])[None] < length
    window = causal(tokens, jnp.zeros(1, jnp.int32), live)
    own, other = params
    read = auxiliary.apply(other, window, Listening())
    made = maps.predicted(of, to, read.entries, window.positions)
    wanted = model.apply(own, window, Listening()).entries
    error = jnp.float32(0)
    for shape, (k, v), guess in zip(to, wanted, made, strict=True):
        for x, y in zip((turned(shape, k.astype(jnp.float32), -window.positions), v.astype(jnp.float32)), guess,
                        strict=True):
            error += jnp.where(live, jnp.abs(x - y).mean((2, 3)), 0).sum() / length
    out = model.apply(own, window, InPlace(kv=tuple(placed(to, made, window.positions))))

    def next_token(logits: Array) -> Array:
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1], -1), tokens[:, 1:, None], -1)[..., 0]
        return -jnp.where(live[:, 1:], logp, 0).sum() / jnp.maximum(length - 1, 1)

    return error, next_token(out.logits()), next_token(read.logits())
