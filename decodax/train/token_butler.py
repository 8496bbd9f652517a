"""Trains the predictor of TokenButler; the model does not change (Akhauri et al., 2025).

The loss of a layer is the mean squared error of its estimated attention logits, over heads and all pairs of a query and
a key of a text, including pairs that the attention mask excludes, as in the authors' code. Losses are added over
layers. The optimizer is AdamW with a short warm-up, a cosine schedule and clipped gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.entry import AskedEntry
from decodax.caches.prefill.listening import Passing
from decodax.caches.shapes import layers_of
from decodax.caches.sparse.token_butler import Butler, layered
from decodax.common.struct import struct
from decodax.core.cache import PyTree
from decodax.core.loaded import Loaded
from decodax.core.types import LayeredModel
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention
from decodax.train.fitting import shuffled, train


@struct
class Scored(Passing):
    """A cache that stores nothing and records: with attention among the tokens of the call alone, its entries are
    keys, values and queries times the scale of the scores (`AskedEntry`)."""

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None, sinks: Array | None = None
              ) -> tuple[Array, PyTree]:
        return window_attention(q, k, v, window.visible(), window.positions, scale=scale, sliding=sliding,
                                softcap=softcap, bias=bias, sinks=sinks), AskedEntry(k, v, q * scale)


def first_butler(lm: Any, reduce: int = 8, inner: int = 512, width: int = 16, seed: int = 0) -> Butler:
    """Returns the initial predictor: kernels by the uniform rule of Glorot and Bengio, biases 0 and scales 1.

    Args:
        lm: a result of `decodax.load`.
        reduce: width of the model divided by the width of the predictor's attention.
        inner: number of channels of its last hidden layers.
        width: number of channels of the queries and keys that it computes.
        seed: random seed.

    Raises:
        ValueError: numbers that do not fit the model.
    """
    if not isinstance(lm, Loaded):
        raise ValueError(f"lm: got {type(lm).__name__}, takes what decodax.load gave")
    model = layered(lm.model)
    D, L, H = model.config.width, model.depth, layers_of(model)[0].queries
    assert H is not None
    if reduce < 1 or D % reduce or (D // reduce) % (2 * H):
        raise ValueError(f"reduce: got {reduce}, takes a divisor of the width {D} that leaves an even number for each "
                         f"of the {H} heads")
    if inner < 1 or width < 2 or width % 2:
        raise ValueError(f"inner, width: got {inner} and {width}, takes 1 or more and an even number from 2")
    R, I, out = D // reduce, inner, H * (L - 1) * width     # noqa: E741
    sizes = dict(reduce=(D, R), query=(R, R), key=(R, R), value=(R, R), up=(R, 2 * R), down=(2 * R, D),
                 query_in=(D, I), query_out=(I, out), key_in=(D, I), key_out=(I, out))
    drawn = {}
    for i, (name, (a, b)) in enumerate(sizes.items()):
        most = (6 / (a + b)) ** 0.5
        drawn[name] = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), i), (a, b), jnp.float32, -most, most)
    for name in ("query_out", "key_out"):
        drawn[name] = drawn[name].reshape(I, H, L - 1, width)
    rope = layers_of(model)[0].rope
    return Butler(**drawn, norm=jnp.ones(D), scale=jnp.ones(R), shift=jnp.zeros(R), up_bias=jnp.zeros(2 * R),
                  down_bias=jnp.zeros(D), theta=10_000.0 if rope is None else rope.theta)


@functools.partial(jax.jit, static_argnums=0)
def estimated(model: LayeredModel, params: Any, butler: Butler, tokens: Array) -> tuple[Array, Array]:
    """Returns the predictor's estimates of a model's attention logits, and the true ones, for tokens `i32[B, T]`: both
    `f32[L - 1, B, H, T, T]`, for all layers but the first, by query and key. They are scaled and not masked. The
    predictor reads the residual stream before the first layer."""
    window = causal(tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    entries = model.apply(params, window, Scored()).entries
    x, _ = model.walk(params, window, Scored())
    attend = lambda q, k, v, scale: (window_attention(q, k, v, window.visible(), window.positions, scale=scale), ())
    queries, keys, _ = butler(x, window.positions, attend)
    found = jnp.einsum("bqhlm,bkhlm->lbhqk", queries, keys) * butler.width ** -0.5

    def logits(q: Array, k: Array) -> Array:
        (B, T, H, d), G = q.shape, k.shape[2]
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", q.reshape(B, T, G, H // G, d), k, preferred_element_type=jnp.float32)
        return scores.reshape(B, H, T, T)

    return found, jnp.stack([logits(entry.queries, entry.keys) for entry in entries[1:]])


def fit_token_butler(lm: Any, texts: Sequence[Sequence[int]], steps: int = 1000, batch: int = 1, rate: float = 1e-3,
                     reduce: int = 8, inner: int = 512, width: int = 16, clip: float = 20.0, seed: int = 0,
                     progress: bool = False) -> Butler:
    """Trains a predictor for a model, which does not change. Needs optax (`decodax[train]`).

    Args:
        lm: a result of `decodax.load`.
        texts: token ids of texts of one length.
        steps: number of training steps.
        batch: number of texts in a step.
        rate: highest learning rate.
        reduce: width of the model divided by the width of the predictor's attention.
        inner: number of channels of the predictor's last hidden layers.
        width: number of channels of the queries and keys that it computes.
        clip: maximum norm of gradients.
        seed: seed of the initial weights and of the order of texts.
        progress: True shows a progress bar.

    Returns:
        The option `butler` of `decodax.caches.token_butler`.

    Raises:
        ValueError: no texts, texts of different lengths, or numbers out of their range.
    """
    if len({len(text) for text in texts}) != 1 or not len(texts[0]):
        raise ValueError(f"texts: got lengths {sorted({len(text) for text in texts})[:3]}, takes texts of one length")
    if steps < 1 or batch < 1 or rate <= 0 or clip <= 0:
        raise ValueError(f"steps, batch, rate, clip: got {steps}, {batch}, {rate} and {clip}, takes numbers above 0")
    butler = first_butler(lm, reduce, inner, width, seed)
    import optax  # only for those who train

    adam = optax.chain(optax.clip_by_global_norm(clip), optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 10, 1), steps), weight_decay=0.01))
    model = layered(lm.model)

    def loss(butler: Butler, params: Any, tokens: Array) -> Array:
        found, wanted = estimated(model, params, butler, tokens)
        return jnp.square(found - wanted).mean((1, 2, 3, 4)).sum()

    every = np.asarray(texts, np.int32)
    batches = ((lm.params, every[rows]) for rows in shuffled(len(texts), batch, np.random.default_rng(seed)))
    return train(loss, butler, batches, adam, steps, progress and "training the predictor")[0]
