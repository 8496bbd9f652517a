"""Learns which channels of keys a model needs, from texts that end with answers (LeanK: Zhang et al., 2025)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.constant import Constant
from decodax.caches.prefill.listening import Passing
from decodax.caches.quantize.leank import sparsified
from decodax.caches.shapes import layers_of
from decodax.common.struct import static, struct
from decodax.core.cache import PyTree
from decodax.core.loaded import network_of
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.train.fitting import padded
from decodax.train.probe import Probe


@struct
class ScaledChannels(Passing):
    """A cache that stores nothing: attention within the window, in which the channels of some keys are scaled.

    The keys are scaled for queries of the answer, except the keys of the first tokens of the text and the latest keys
    before each query.

    Attributes:
        factors: factor of each channel, a tuple of one `f32[G, d]` for each layer.
        start: `i32[]`, position of the first token of the answer; queries before it see unscaled keys.
        sinks: static; number of first tokens whose keys are not scaled.
        recent: static; number of latest tokens whose keys are not scaled.
    """

    factors: tuple[Array, ...]
    start: Array
    sinks: int = static()
    recent: int = static()

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
              **options: Any) -> tuple[Array, PyTree]:
        if any(x is not None for x in options.values()):
            raise ValueError("lm: got a model with sliding windows, a soft cap or a bias of its scores, takes one "
                             "without")
        (B, W, H, d), G = q.shape, k.shape[2]
        q = q.reshape(B, W, G, H // G, d).astype(jnp.float32) * scale
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        plain, scaled = (jnp.einsum("bwgrd,bsgd->bgrws", q, keys) for keys in (k, k * self.factors[layer]))
        at, of = jnp.arange(W)[:, None], jnp.arange(W)
        whole = (at < self.start) | (of < self.sinks) | (of > at - self.recent)
        scores = jnp.where(window.visible()[:, None, None], jnp.where(whole, plain, scaled), -1e30)
        out = jnp.einsum("bgrws,bsge->bwgre", jax.nn.softmax(scores), v)
        return out.reshape(B, W, H, -1), ()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _slope(model: Model, sinks: int, recent: int, params: Any, factors: Array, mask: Array, tokens: Array, start: Array,
           stop: Array, weight: Array) -> Array:
    """Returns the gradient of the loss with respect to all `factors`. In the loss, factors outside `mask` are 0
    (straight-through estimator)."""
    n = tokens.shape[1]
    counts = (jnp.arange(n) >= start) & (jnp.arange(n) < stop)
    window = causal(tokens, jnp.zeros(1, jnp.int32), jnp.arange(n)[None] < stop)

    def hidden(factors: Array) -> Array:
        cache = ScaledChannels(factors=tuple(factors), start=start, sinks=sinks, recent=recent)
        return model.apply(params, window, cache).hidden[0].astype(jnp.float32)

    wanted = hidden(jnp.ones_like(factors))

    def loss(factors: Array) -> Array:
        used = factors + jax.lax.stop_gradient(jnp.where(mask, factors, 0) - factors)
        error = jnp.square(hidden(used) - wanted).mean(-1)
        return jnp.where(counts, error, 0).sum() / counts.sum() + weight * jnp.abs(factors).mean()

    return jax.grad(loss)(factors)


def fit_channels(lm: Any, probes: Sequence[Probe], ratio: float = 0.7, align: int = 32, steps: tuple[int, int] = (2000,
                 200), rates: tuple[float, float] = (0.02, 0.01), penalty: float = 0.06, sinks: int = 128,
                 recent: int = 768, seed: int = 0, params: Any = None) -> Constant:
    """Learns the channels of LeanK in its two stages; the weights of the model do not change.

    Each channel has a factor between 0 and 1, initially 1. The factors are trained by Adam, one text in each step, on
    the squared error of the last hidden states of the answers. The first stage adds a penalty on the mean of the
    factors. In the second stage, the factors of channels that would be pruned count as 0.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        probes: texts with the bounds of their answers; tokens after an answer are not used.
        ratio: share of channels that are pruned.
        align: each head keeps a multiple of this number of channels.
        steps: number of steps of the two stages.
        rates: learning rates of the two stages.
        penalty: weight of the penalty in the first stage.
        sinks: number of first tokens that keep all channels.
        recent: number of latest tokens that keep all channels.
        seed: seed of the order of texts.
        params: the weights of a bare `Model`.

    Returns:
        The option `channels` of `decodax.caches.leank`.

    Raises:
        ValueError: no texts, layers of different shapes, or a number out of its range.
    """
    if not probes:
        raise ValueError("probes: got none, takes at least one")
    if not 0 < ratio < 1 or align < 1:
        raise ValueError(f"ratio, align: got {ratio} and {align}, takes a number between 0 and 1, and 1 or more")
    model, weights = network_of(lm, params)
    shapes = layers_of(model)
    if len({(shape.heads, shape.width) for shape in shapes}) > 1:
        raise ValueError("lm: got a model whose layers have keys of different shapes, takes one shape")
    factors = np.ones((len(shapes), shapes[0].heads, shapes[0].width), np.float32)
    random, every = np.random.default_rng(seed), np.ones(factors.shape, bool)
    for stage, (count, rate, weight) in enumerate(zip(steps, rates, (penalty, 0.0), strict=True)):
        first: np.ndarray = np.zeros_like(factors)
        second: np.ndarray = np.zeros_like(factors)
        order = [i for _ in range(-(-count // len(probes))) for i in random.permutation(len(probes))]
        for step, which in enumerate(order[:count]):
            factors = np.clip(factors, 0, 1)
            probe = probes[which]
            tokens = padded([probe.tokens[:probe.stop]])
            mask = sparsified(factors, ratio, align) if stage else every
            slope = np.asarray(_slope(model, sinks, recent, weights, jnp.asarray(factors), jnp.asarray(mask), tokens,
                                      jnp.int32(probe.start), jnp.int32(probe.stop), jnp.float32(weight)))
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope ** 2
            # warm-up and decay over a fifth of the steps each
            part = max(count // 5, 1)
            own = rate * min(1, max((step + 1) / part, 0.1), max((count - step) / part, 0.1))
            moved = first / (1 - 0.9 ** (step + 1)) / (np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8)
            factors = (factors - own * moved).astype(np.float32)
    return Constant(sparsified(np.clip(factors, 0, 1), ratio, align))
