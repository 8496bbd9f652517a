"""Trains the kernels of LESS on texts (Dong et al., 2024): each layer alone, against its own full attention."""

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
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, window_attention_lse
from decodax.train.fitting import padded


@struct
class Lesson(Struct):
    """Training data of a layer's kernels: a text of `T` tokens, or several, `[N, T, ...]`.

    Attributes:
        q, k, v: queries `f32[T, H, d]`, rotated keys `f32[T, G, d]`, values `f32[T, G, e]`.
        wanted: `f32[T, H, e]`, full attention.
        near, lse: attention to the tokens that are kept, `f32[T, H, e]`, and the logarithms of its sums, `f32[T, H]`.
    """

    q: Array
    k: Array
    v: Array
    wanted: Array
    near: Array
    lse: Array


@struct
class Lessons(Passing):
    """A cache that holds nothing: full attention within a window. Its entries are `Lesson`s."""

    sinks: int = static()
    recent: int = static()

    def heard(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float, sliding: int | None = None,
              softcap: float | None = None, bias: Bias | None = None) -> tuple[Array, PyTree]:
        if sliding is not None or softcap is not None or bias is not None:
            raise ValueError("lm: got a model with sliding windows, a soft cap or a bias of its scores, takes one "
                             "without")
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
    """Returns attention of one text, exact to the tokens that are kept and by the kernels to the others,
    `f32[T, H, e]`.

    Args:
        dropped: factors of the hidden numbers of `phi` and of `psi`, for dropout.
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
    """Returns the mean squared error of a layer's output against full attention, `f32[]`, over the tokens of texts
    `[N, T, ...]` after the first `sinks + recent`.

    Args:
        lengths: `i32[N]`. outputs: `f32[H, e, D]`, see `Model.outputs`.
        dropout: share of the hidden numbers that are dropped, drawn with `key`.
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
    """Returns the initial kernels, for `heads` key heads and `queries` query heads."""
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
    """Trains the kernels of LESS on the squared error of each layer's output. Takes optax (`decodax[train]`).

    The optimizer is Adam, whose rate is halved after each quarter of the epochs. With ten or more texts, a tenth of
    them is held out, and the kernels of the epoch with the least error on these are returned; else those of the last
    epoch.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids, longer than the window. The authors take 512 texts as long as the model's context.
        start_size, recent_size: numbers of first and of latest tokens, which are read exactly; as in the cache `less`.
        rank, hidden: widths of the kernels. epochs, batch, rate, dropout: of training. seed: of weights and batches.
        progress: whether a progress bar is shown.

    Returns:
        The option `kernels` of `decodax.caches.less`.

    Raises:
        ValueError: no texts, one that is not longer than the window, a number out of its range, or layers of different
            shapes.
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
            lessons = _lessons(model, *sizes, weights, tokens, lengths, layer)
            outputs = model.outputs(weights, layer)
            key = jax.random.fold_in(jax.random.key(seed), layer)
            assert shape.queries is not None
            kernels = best = first_kernels(shape.heads, shape.queries, shape.width, rank, hidden, key)
            state, least = adam.init(kernels), np.inf
            for i in range(epochs):
                some = random.permutation(train)[:steps * batch].reshape(steps, batch)
                kernels, state = epoch(kernels, state, lessons, outputs, jnp.asarray(some), jax.random.fold_in(key, i))
                error = float(test(kernels, lessons, outputs)) if held else 0.0
                if not held or error < least:
                    best, least = kernels, error
                report(layer * epochs + i + 1)
            made.append(best)
    return LessKernels.of(made)


def _lessons(model: Model, sinks: int, recent: int, params: Any, tokens: np.ndarray, lengths: np.ndarray,
             layer: int) -> Lesson:
    """Returns the training data of one layer, of all texts."""
    one = lambda row, length: _heard(model, sinks, recent, params, row[None], length)[layer]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *(one(*text) for text in zip(tokens, lengths, strict=True)))
