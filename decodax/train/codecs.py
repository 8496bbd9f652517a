"""What some codecs measure on a model before they are used: centroids, features, orders of channels.

All of them look at the keys, before their rotation, and the values that texts have in each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.constant import Constant
from decodax.caches.prefill.listening import Listening
from decodax.caches.quantize.cq import Codebooks
from decodax.caches.quantize.cskv import KVFeatures
from decodax.caches.quantize.hadamard import transformed
from decodax.caches.rotation import before_rotation
from decodax.caches.shapes import layers_of
from decodax.common.struct import Struct, struct
from decodax.core.loaded import network_of
from decodax.core.types import Model
from decodax.core.window import causal


@struct
class LayerSamples(Struct):
    """Keys, before their rotation, and values of one layer of all texts together: `f32[N, G, d]` and `f32[N, G, e]`;
    and how much each of those numbers matters, of the same shapes: the squares of the gradients of the loss on the next
    tokens; or ones."""

    keys: np.ndarray
    values: np.ndarray
    key_weights: np.ndarray
    value_weights: np.ndarray


def observed(lm: Any, texts: Sequence[Sequence[int]], params: Any = None,
             gradients: bool = False) -> list[LayerSamples]:
    """Keys and values of each layer, over all tokens of texts.

    Args:
        lm: what `decodax.load` gave, or a `Model` with its `params`. texts: token ids.
        gradients: whether to weigh numbers by them; else ones.

    Raises:
        ValueError: no texts, or one without two tokens.
    """
    if not texts:
        raise ValueError("texts: got none, takes at least one")
    model, weights = network_of(lm)
    weights = params if weights is None else weights
    shapes = layers_of(model)
    rows: list[list[tuple[np.ndarray, ...]]] = [[] for _ in shapes]
    for text in texts:
        if (length := len(text)) < 2:
            raise ValueError(f"texts: got one of {length} tokens, takes 2 or more")
        tokens = np.zeros((1, -(-length // 64) * 64), np.int32)
        tokens[0, :length] = text
        for layer, parts in enumerate(_listen(model, tuple(shapes), gradients, weights, tokens, np.int32(length))):
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
        none = tuple((jnp.zeros((1, n, s.heads, s.width)), jnp.zeros((1, n, s.heads, s.both - s.width)))
                     for s in shapes)
        slopes, entries = jax.grad(loss, has_aux=True)(none)
    else:
        _, entries = loss(none)
        slopes = jax.tree.map(jnp.ones_like, entries)
    back = lambda shape, x: before_rotation(shape, x[0].astype(jnp.float32).swapaxes(0, 1), jnp.int32(0)).swapaxes(0, 1)
    # gradients turn as keys do, since a rotation is orthogonal
    made: list[tuple[Array, ...]] = []
    for shape, (k, v), (dk, dv) in zip(shapes, entries, slopes, strict=True):
        weigh = jnp.square if gradients else jnp.ones_like
        made.append((back(shape, k), v[0].astype(jnp.float32), weigh(back(shape, dk)), weigh(dv[0])))
    return made


def fit_codebooks(lm: Any, texts: Sequence[Sequence[int]], channels: int = 4, bits: int = 8, loops: int = 100,
                  fisher: bool = True, seed: int = 0, params: Any = None) -> Codebooks:
    """The centroids of CQ (Zhang et al., 2024): by k-means over each group of channels of each head, begun by
    k-means++; with `fisher`, a token's group counts as much as the squares of its gradients add up to.

    Args:
        lm, texts, params: as of `observed`. channels: of a group, a divisor of the widths of heads.
        bits: of a group. loops: of k-means, fewer where nothing moves any more.

    Returns:
        What `decodax.caches.make("cq", codebooks=...)` takes.
    """
    if channels < 1 or not 1 <= bits <= 16:
        raise ValueError(f"channels, bits: got {channels} and {bits}, takes 1 or more, and 1 to 16")
    random, books = np.random.default_rng(seed), ([], [])       # type: ignore[var-annotated]
    for own in observed(lm, texts, params, fisher):
        for into, x, weights in ((books[0], own.keys, own.key_weights), (books[1], own.values, own.value_weights)):
            if x.shape[2] % channels:
                raise ValueError(f"channels: got {channels}, takes a divisor of {x.shape[2]}")
            N, G, d = x.shape
            groups = x.reshape(N, G, d // channels, channels).astype(np.float64)
            each = weights.reshape(groups.shape).sum(-1, dtype=np.float64)
            into.append([[k_means(groups[:, g, m], each[:, g, m], 1 << bits, loops, random)
                          for m in range(d // channels)] for g in range(G)])
    return Codebooks(*(Constant(np.array(book, np.float32)) for book in books))


def k_means(x: np.ndarray, weights: np.ndarray, count: int, loops: int, random: np.random.Generator) -> np.ndarray:
    """`count` centroids `f64[count, c]` of points `f64[N, c]` of such weights: k-means++ and Lloyd's iteration.

    Where there are no more different points than centroids, these are the points, and the last one over and over.
    """
    weights = np.maximum(weights, weights.max() * 1e-12) if weights.max() > 0 else np.ones(len(x))
    points, index = np.unique(x, axis=0, return_inverse=True)
    mass = np.bincount(index.ravel(), weights, len(points))
    if len(points) <= count:
        return np.concatenate([points, points[-1:].repeat(count - len(points), 0)])
    centres: np.ndarray = np.empty((count, x.shape[1]))
    centres[0] = points[random.choice(len(points), p=mass / mass.sum())]
    near = np.square(points - centres[0]).sum(1)
    for i in range(1, count):
        p = near * mass
        centres[i] = points[random.choice(len(points), p=p / p.sum())]
        near = np.minimum(near, np.square(points - centres[i]).sum(1))
    for _ in range(loops):
        far = np.square(centres).sum(1) - 2 * points @ centres.T
        of = far.argmin(1)
        total = np.bincount(of, mass, count)
        new: np.ndarray = np.stack([np.bincount(of, mass * points[:, j], count) for j in range(x.shape[1])], 1)
        new = np.where(total[:, None] > 0, new / np.maximum(total[:, None], 1e-300), centres)
        if np.array_equal(new, centres):
            break
        centres = new
    return centres


def fit_features(lm: Any, texts: Sequence[Sequence[int]], keys: float | int = 0.2, values: float | int = 0.2,
                 params: Any = None) -> KVFeatures:
    """The factors of CSKV (Wang et al., 2024) with the least squared error of keys and values on texts.

    Args:
        lm, texts, params: as of `observed`.
        keys, values: features of a token, a number of them or (below 1) a share of the channels of all heads.

    Returns:
        What `decodax.caches.make("cskv", features=...)` takes.
    """
    made: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for own in observed(lm, texts, params):
        for into, x, rank, name in ((made[0], own.keys, keys, "keys"), (made[1], own.values, values, "values")):
            flat = x.reshape(len(x), -1).astype(np.float64)
            r = max(round(rank * flat.shape[1]), 1) if isinstance(rank, float) and 0 < rank < 1 else rank
            if not isinstance(r, int) or not 1 <= r <= flat.shape[1]:
                raise ValueError(f"{name}: got {rank}, takes 1 to {flat.shape[1]} features, or a share between 0 and 1")
            into.append(np.linalg.eigh(flat.T @ flat)[1][:, ::-1][:, :r])
    return KVFeatures(*(Constant(np.stack(part).astype(np.float32)) for part in made))


def fit_order(lm: Any, texts: Sequence[Sequence[int]], heads: int = 4, params: Any = None) -> Constant:
    """The order of channels of RotateKV (Su et al., 2025): that of their sums over the tokens of texts, behind the
    transform of `heads` heads together.

    Returns:
        What `decodax.caches.make("rotatekv", order=...)` takes.
    """
    model, _ = network_of(lm)
    return Constant(np.stack([_order(own, shape, heads) for own, shape in
                              zip(observed(lm, texts, params), layers_of(model), strict=True)]))


def _order(own: LayerSamples, shape: KVLayer, heads: int) -> np.ndarray:
    wide = np.gcd(heads, shape.heads) * shape.width
    sums = np.asarray(transformed(jnp.asarray(own.keys.reshape(len(own.keys), -1)), int(wide))).sum(0, dtype=np.float64)
    return np.argsort(sums, kind="stable").astype(np.int32)
