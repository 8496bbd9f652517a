"""Trains the network of AttentionPredictor on the attention maps of a model (Yang et al., 2025).

One network serves all layers and heads. From the attention of earlier tokens it predicts the attention of the next
token, given as the largest weight in each block of keys. The loss is the mean squared error over blocks. The maps are
those of full attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.caches.sparse.attention_net import AttentionNet, expected
from decodax.core.loaded import network_of
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.train.fitting import train
from decodax.train.token_butler import Scored


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention_maps(model: Model, block: int, params: Any, tokens: Array) -> tuple[Array, Array]:
    """Returns the attention weights of all layers and heads in a text `i32[T]`, `f32[L, H, T, T]`, and the largest
    weight in each block of `block` keys, `f32[L, H, T, n]`."""
    window = causal(tokens[None], jnp.zeros(1, jnp.int32))
    T, found = len(tokens), []
    for entry in model.apply(params, window, Scored()).entries:
        q, k = entry.queries, entry.keys
        q = q[0].astype(jnp.float32).reshape(T, k.shape[2], -1, q.shape[-1])
        scores = jnp.einsum("qgrd,kgd->grqk", q, k[0].astype(jnp.float32)).reshape(-1, T, T)
        found.append(jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf), axis=-1))
    maps = jnp.stack(found)
    wide = jnp.pad(maps, ((0, 0), (0, 0), (0, 0), (0, -T % block)))
    return maps, wide.reshape(*maps.shape[:3], -1, block).max(-1)


def squared_error(arrays: Sequence[Array], images: Array, at: Array, size: Array, history: int, sinks: int,
                  recent: int) -> Array:
    """Returns the mean squared error, `f32[]`, of the scores that the network predicts for one token.

    The mean is over the `N` images and over the first `size` blocks, without the first `sinks` blocks and the latest
    `recent` blocks.

    Args:
        arrays: the weights of the network.
        images: `f32[N, T, n]`, the largest attention weight of each token in each block, for `N` heads.
        at: `i32[]`, position of the token.
        size: `i32[]`, number of blocks of the text before the token.
        history: number of earlier tokens whose attention the network gets.
        sinks: number of first blocks that are left out.
        recent: number of latest blocks that are left out.
    """
    found, free = scores_before(arrays, images, at, size, history, sinks, recent)
    error = jnp.square(found - images[:, at])
    return jnp.where(free, error, 0).sum() / jnp.maximum(free.sum() * len(images), 1)


def scores_before(arrays: Sequence[Array], images: Array, at: Array, size: Array, history: int, sinks: int,
                  recent: int) -> tuple[Array, Array]:
    """Returns the scores that the network predicts for each of `n` blocks of keys, for the token at position `at`,
    `f32[N, n]` for `N` heads; and True for blocks that count in the loss, `bool[n]`.

    The input is the attention of the `history` tokens before; the arguments are described in `squared_error`.
    """
    block = jnp.arange(images.shape[2])
    free = (block >= sinks) & (block < size - recent)
    # before the beginning of the text there is nothing
    image = lax.dynamic_slice_in_dim(jnp.pad(images, ((0, 0), (history, 0), (0, 0))), at, history, 1)
    return expected(arrays, image, (jnp.arange(history) >= history - at)[:, None] & free), free


def first_net(channels: tuple[int, int] = (16, 32), seed: int = 0) -> AttentionNet:
    """Returns the initial network. A weight is drawn uniformly within `inputs ** -0.5`, where `inputs` is the number of
    inputs of its output channel.

    Args:
        channels: number of output channels of both convolutions.
        seed: random seed.
    """
    r, (a, b) = np.random.default_rng(seed), channels
    draw = lambda inputs, *shape: r.uniform(-1, 1, shape) / inputs ** 0.5
    return AttentionNet.of((draw(9, a, 1, 3, 3), draw(9, a), draw(9 * a, b, a, 3, 3), draw(9 * a, b), draw(b, b),
                            draw(b)))


def fit_attention_predictor(lm: Any, texts: Sequence[Sequence[int]], steps: int = 1000, batch: int = 8,
                            rate: float = 1e-3, sinks: int = 64, recent: int = 64, block: int = 16, history: int = 64,
                            skip: Sequence[int] = (), channels: tuple[int, int] = (16, 32), seed: int = 0,
                            progress: bool = False, params: Any = None) -> AttentionNet:
    """Trains the network with Adam; the model does not change. Needs optax (`decodax[train]`).

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids.
        steps: number of training steps, each with one text.
        batch: number of tokens of the text whose attention is predicted in a step.
        rate: initial learning rate, which falls to a tenth.
        sinks: number of first tokens that the cache always attends to; they are not predicted.
        recent: number of latest tokens that the cache always attends to; they are not predicted.
        block: number of tokens in a block of keys.
        history: number of earlier tokens whose attention the network gets.
        skip: indices of layers that are not used.
        channels: number of output channels of both convolutions.
        seed: seed of the initial weights and of the batches.
        progress: True shows a progress bar.
        params: the weights of a bare `Model`.

    Returns:
        The option `net` of `decodax.caches.attention_predictor`.

    Raises:
        ValueError: no texts, or one that is too short to have blocks to choose from.
    """
    if not texts:
        raise ValueError("texts: got none, takes at least one")
    least = sinks + recent + 3 * block
    if (shortest := min(map(len, texts))) <= least:
        raise ValueError(f"texts: got one of {shortest} tokens, takes more than {least}")
    if min(steps, batch, history, block, recent) < 1 or rate <= 0:
        raise ValueError(f"steps, batch, history, block, recent, rate: got {steps}, {batch}, {history}, {block}, "
                         f"{recent} and {rate}, takes numbers above 0")
    import optax  # only for those who train

    model, weights = network_of(lm, params)
    images = []
    for text in texts:
        _, own = attention_maps(model, block, weights, jnp.asarray(text, jnp.int32))
        images.append(np.asarray(own)[[i for i in range(len(own)) if i not in skip]].reshape(-1, *own.shape[2:]))
    random = np.random.default_rng(seed)

    def loss(arrays: Any, images: Array, at: Array) -> Array:
        each = lambda at: squared_error(arrays, images, at, -(-at // block), history, sinks // block, recent // block)
        return jax.vmap(each)(at).mean()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            own = images[random.integers(len(images))]
            yield own, random.integers(least, own.shape[1], batch).astype(np.int32)

    adam = optax.adam(optax.cosine_decay_schedule(rate, steps, 0.1))
    arrays, _ = train(loss, first_net(channels, seed).arrays, batches(), adam, steps,
                      progress and "training the network")
    return AttentionNet.of(arrays)
