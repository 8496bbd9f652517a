"""Trains the kernels of LESS on texts (Dong et al., 2024). Each layer is trained separately, against its own full
attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.caches.bounded.less import LayerKernels, LessKernels, with_ones
from decodax.caches.prefill.listening import Passing
from decodax.caches.shapes import layers_of
from decodax.common.progress import bar
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import PyTree
from decodax.core.loaded import network_of
from decodax.core.types import Model, outputs
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention_lse
from decodax.train.fitting import padded


@struct
class Lesson(Struct):
    """Training data for the kernels of one layer: a text of `T` tokens, or `N` texts, with a leading axis `N`.

    Attributes:
        q: queries, `f32[T, H, d]`.
        k: rotated keys, `f32[T, G, d]`.
        v: values, `f32[T, G, e]`.
        wanted: `f32[T, H, e]`, the output of full attention.
        near: `f32[T, H, e]`, the output of attention to the tokens that are kept exactly.
        lse: `f32[T, H]`, the log-sum-exp of the scores of `near`.
    """

    q: Array
    k: Array
    v: Array
    wanted: Array
    near: Array
    lse: Array


@struct
class Lessons(Passing):
    """A cache that stores nothing: full attention within the window. Its entries are the `Lesson` of each layer.

    Attributes:
        sinks: static; number of first tokens that are kept exactly.
        recent: static; number of latest tokens that are kept exactly.
    """

    sinks: int = static()
    recent: int = static()

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None,
              sinks: Array | None = None) -> tuple[Array, PyTree]:
        if any(x is not None for x in (sliding, softcap, bias, sinks)):
            raise ValueError("lm: got a model with sliding windows, or a soft cap, a bias or sinks of its scores, "
                             "takes one without")
        at, mask = window.positions, window.visible()
        out, _ = window_attention_lse(q, k, v, mask, at, scale=scale)
        kept = (at < self.sinks)[:, None] | (at[:, None] >= (at - self.recent)[:, :, None])
        near, lse = window_attention_lse(q, k, v, mask & kept, at, scale=scale)
        return out, Lesson(*(x.astype(jnp.float32) for x in (q, k, v, out, near, lse)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _heard(model: Model, sinks: int, recent: int, params: Any, tokens: Array, length: Array) -> Sequence[Lesson]:
    window = causal(tokens, jnp.zeros(1, jnp.int32), jnp.arange(tokens.shape[1])[None] < length)
    return model.apply(params, window, Lessons(sinks=sinks, recent=recent)).entries


def synthesized(kernels: LayerKernels, own: Lesson, sinks: int, recent: int,
                dropped: tuple[Array | float, Array | float] = (1.0, 1.0)) -> Array:
    """Returns the attention output of LESS for one text, `f32[T, H, e]`: exact for the first `sinks` and
    the latest `recent` tokens, approximated by the kernels for the others.

    Args:
        kernels: the kernels of the layer.
        own: the training data of the layer.
        sinks: number of first tokens that are kept exactly.
        recent: number of latest tokens that are kept exactly.
        dropped: factors of the hidden channels of `phi` and of `psi`, for dropout.
    """
    phi, psi = kernels.phi(own.q, dropped[0]), kernels.psi(own.k, dropped[1])
    (T, H, r), G = phi.shape, psi.shape[1]
    psi = jnp.where((jnp.arange(T) >= sinks)[:, None, None], psi, 0)
    # the state after each token; a query reads the one after the last token that it does not read exactly
    states = jnp.cumsum(jnp.einsum("tgr,tge->tgre", psi, with_ones(own.v)), 0)
    states = jnp.pad(states, ((recent + 1, 0), (0, 0), (0, 0), (0, 0)))[:T]
    sums = jnp.einsum("tgmr,tgre->tgme", phi.reshape(T, G, H // G, r), states).reshape(T, H, -1)
    sums = sums * jnp.exp(jnp.minimum(-own.lse, 80.0))[..., None]
    return (own.near + sums[..., :-1]) / (1 + sums[..., -1:])


def squared_error(kernels: LayerKernels, lessons: Lesson, lengths: Array, outputs: Array, sinks: int, recent: int,
                  dropout: float = 0.0, key: Array | None = None) -> Array:
    """Returns the mean squared error of a layer's attention output (after the output projection) against full
    attention, `f32[]`, over the tokens of texts `[N, T, ...]` after the first `sinks + recent`.

    Args:
        kernels: the kernels of the layer.
        lessons: the training data of the layer.
        lengths: `i32[N]`, number of tokens of each text.
        outputs: `f32[H, e, D]`, the output projection.
        sinks: number of first tokens that are kept exactly.
        recent: number of latest tokens that are kept exactly.
        dropout: share of the hidden channels that are dropped.
        key: random key of the dropout; None: no dropout.
    """
    T, hidden = lessons.q.shape[1], kernels.query_in.shape[-1]

    def one(own: Lesson, length: Array, key: Array | None) -> tuple[Array, Array]:
        dropped: Any = (1.0, 1.0)
        if key is not None:
            dropped = tuple(jax.random.bernoulli(each, 1 - dropout, (T, heads, hidden)) / (1 - dropout)
                            for each, heads in zip(jax.random.split(key), (own.q.shape[1], own.k.shape[1]),
                                                   strict=True))
        error = synthesized(kernels, own, sinks, recent, dropped) - own.wanted
        counts = (jnp.arange(T) >= sinks + recent) & (jnp.arange(T) < length)
        squares = jnp.square(jnp.einsum("the,hed->td", error, outputs)).mean(-1)
        return jnp.where(counts, squares, 0).sum(), counts.sum()

    keys = None if key is None or not dropout else jax.random.split(key, len(lengths))
    total, count = jax.vmap(one, in_axes=(0, 0, None if keys is None else 0))(lessons, lengths, keys)
    return total.sum() / jnp.maximum(count.sum(), 1)


def first_kernels(heads: int, queries: int, width: int, rank: int, hidden: int, key: Array) -> LayerKernels:
    """Returns the initial kernels of a layer.

    Args:
        heads: number of key heads.
        queries: number of query heads.
        width: number of channels of a head.
        rank: number of features of the kernels.
        hidden: number of hidden channels of the kernels.
        key: random key.
    """
    def draw(i: int, *shape: int) -> Array:
        most = (6 / (shape[1] + shape[2])) ** 0.5
        return jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -most, most)

    small = jnp.full((heads, rank), 1e-4)
    return LayerKernels(query_in=draw(0, queries, width, hidden), query_out=draw(1, queries, hidden, rank),
                        key_in=draw(2, heads, width, hidden), key_out=draw(3, heads, hidden, rank), scale=small,
                        mix=draw(4, heads, rank, rank), mix_scale=small)


def fit_less(lm: Any, texts: Sequence[Sequence[int]], start_size: int = 4, recent_size: int = 512, rank: int = 8,
             hidden: int = 512, epochs: int = 40, batch: int = 2, rate: float = 1e-3, dropout: float = 0.3,
             seed: int = 0, progress: bool = False, params: Any = None) -> LessKernels:
    """Trains the kernels of LESS, which replace attention to evicted tokens. Needs optax (`decodax[train]`).

    Each layer is trained by itself on the squared error of its attention output (after the output projection) against
    full attention. The optimizer is Adam; its rate is halved after each quarter of the epochs. With ten or more texts,
    a tenth of them is held out, and the kernels of the epoch with the smallest error on these are returned; otherwise
    the kernels of the last epoch.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids; each text is longer than `start_size + recent_size`. The authors use 512 texts of the model's
            context length.
        start_size: number of first tokens that are attended to exactly, as in the cache.
        recent_size: number of latest tokens that are attended to exactly, as in the cache.
        rank: number of features of the kernels.
        hidden: number of hidden channels of the kernels.
        epochs: number of passes over the texts.
        batch: number of texts in a training step.
        rate: initial learning rate.
        dropout: share of hidden channels that are dropped in training.
        seed: seed of the initial kernels and of the batches.
        progress: True shows a progress bar.
        params: the weights of a bare `Model`.

    Returns:
        The option `kernels` of `decodax.caches.less`.

    Raises:
        ValueError: no texts, a text that is too short, a number out of its range, or layers of different shapes.
    """
    if not texts:
        raise ValueError("texts: got none, takes at least one")
    sizes = start_size, recent_size
    if (shortest := min(map(len, texts))) <= sum(sizes):
        raise ValueError(f"texts: got one of {shortest} tokens, takes more than the {sum(sizes)} that are kept")
    if min(rank, hidden, epochs, batch, recent_size) < 1 or start_size < 0 or not 0 <= dropout < 1:
        raise ValueError(f"rank, hidden, epochs, batch, recent_size, start_size, dropout: got {rank}, {hidden}, "
                         f"{epochs}, {batch}, {recent_size}, {start_size} and {dropout}, takes 1 or more, of "
                         "start_size 0 or more, and of dropout 0 up to below 1")
    import optax  # only for those who train

    model, weights = network_of(lm, params)
    shapes = layers_of(model)
    if len({(s.heads, s.width, s.both, s.queries) for s in shapes}) > 1 or shapes[0].queries is None:
        raise ValueError("lm: got a model whose layers have keys and values of different shapes, takes one shape")
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = padded(texts)
    random, made = np.random.default_rng(seed), []
    held, order = len(texts) // 10, random.permutation(len(texts))
    train, batch = order[held:], min(batch, len(texts) - held)
    steps = len(train) // batch
    adam = optax.adam(optax.exponential_decay(rate, max(epochs // 4, 1) * steps, 0.5, staircase=True))

    @jax.jit
    def epoch(kernels: LayerKernels, state: Any, lessons: Lesson, outputs: Array, some: Array,
              key: Array) -> tuple[LayerKernels, Any]:
        def step(carry: Any, drawn: Any) -> tuple[Any, None]:
            (kernels, state), (rows, key) = carry, drawn
            own = jax.tree.map(lambda x: x[rows], lessons)
            slope = jax.grad(squared_error)(kernels, own, jnp.asarray(lengths)[rows], outputs, *sizes, dropout, key)
            change, state = adam.update(slope, state)
            return (optax.apply_updates(kernels, change), state), None

        return lax.scan(step, (kernels, state), (some, jax.random.split(key, len(some))))[0]

    test = jax.jit(lambda kernels, lessons, outputs: squared_error(
        kernels, jax.tree.map(lambda x: x[order[:held]], lessons), jnp.asarray(lengths)[order[:held]], outputs, *sizes))
    with bar(progress, "training kernels", len(shapes) * epochs) as report:
        for layer, shape in enumerate(shapes):
            lessons = lessons_of(model, *sizes, weights, tokens, lengths, layer)
            projections = outputs(model, weights, layer)
            key = jax.random.fold_in(jax.random.key(seed), layer)
            assert shape.queries is not None
            kernels = best = first_kernels(shape.heads, shape.queries, shape.width, rank, hidden, key)
            state, least = adam.init(kernels), np.inf
            for i in range(epochs):
                some = random.permutation(train)[:steps * batch].reshape(steps, batch)
                kernels, state = epoch(kernels, state, lessons, projections, jnp.asarray(some),
                                       jax.random.fold_in(key, i))
                error = float(test(kernels, lessons, projections)) if held else 0.0
                if not held or error < least:
                    best, least = kernels, error
                report(layer * epochs + i + 1)
            made.append(best)
    return LessKernels.of(made)


def lessons_of(model: Model, sinks: int, recent: int, params: Any, tokens: np.ndarray, lengths: np.ndarray,
             layer: int) -> Lesson:
    """Returns the training data of one layer for `N` texts of up to `T` tokens, with arrays `[N, T, ...]`.

    Args:
        model, params: the model and its weights.
        sinks, recent: numbers of first and of latest tokens that are kept exactly.
        tokens: `i32[N, T]`, the texts.
        lengths: `i32[N]`, number of tokens of each.
        layer: index of the layer.
    """
    one = lambda row, length: _heard(model, sinks, recent, params, row[None], length)[layer]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *(one(*text) for text in zip(tokens, lengths, strict=True)))
