"""Fits the linear predictors of AQUA-KV and the grids of its quantizer (Shutova et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from decodax.caches.constant import Constant
from decodax.caches.quantize.aqua_kv import HIGGS, Predictors, affine
from decodax.train.k_means import lloyd
from decodax.train.samples import observed


def gaussian_pairs(count: int, samples: int = 100_000, loops: int | None = None, seed: int = 0) -> np.ndarray:
    """Returns a grid of pairs, `f32[count, 2]`, for the vector quantization of standard normal numbers, by Lloyd's
    iteration on samples.

    The squared error of a number is 0.1085 with 16 pairs and 0.0081 with 256; that of the authors' tables is 0.1083 and
    0.0078 (on 50,000 other samples).

    Args:
        count: number of pairs.
        samples: number of random pairs to which the grid is fitted.
        loops: number of iterations. None: 100 with up to 64 pairs, else 30.
        seed: seed of the random pairs.
    """
    x = np.random.default_rng(seed).standard_normal((samples, 2))
    # a sequence that fills the square evenly, mapped to a normal distribution of twice the variance, which is how the
    # best pairs are distributed where there are many
    even = (0.5 + np.arange(1, count + 1)[:, None] * np.array([0.7548776662466927, 0.5698402909980532])) % 1
    grid = np.asarray(ndtri(jnp.asarray(even)), np.float64) * 2 ** 0.5
    loops = (100 if count <= 64 else 30) if loops is None else loops
    return lloyd(x, np.ones(samples), grid, loops).astype(np.float32)


def ridge(x: np.ndarray, y: np.ndarray, damping: float) -> np.ndarray:
    """Returns the affine map from inputs with `c` channels to outputs with `n` channels that has the smallest squared
    error on `N` examples, `f32[c + 1, n]`; the last row is the bias.

    Args:
        x: the inputs, `f[N, c]`.
        y: the outputs, `f[N, n]`.
        damping: this factor times the mean of the diagonal of the normal matrix is added to its diagonal.
    """
    x = np.concatenate([x, np.ones((len(x), 1))], 1).astype(np.float64)
    products = x.T @ x
    products[np.diag_indices_from(products)] += damping * np.abs(np.diag(products)).mean()
    return (np.linalg.pinv(products) @ (x.T @ y.astype(np.float64))).astype(np.float32)


def fit_predictors(lm: Any, texts: Sequence[Sequence[int]], damping: float = 1e-3, group_size: int = 1024,
                   grid: Any = None, first: Any = None, params: Any = None) -> Predictors:
    """Fits the predictors of AQUA-KV layer by layer: linear maps from the decoded keys and values of the previous
    layer.

    Args:
        lm: a result of `decodax.load`, or a `Model` with its `params`.
        texts: token ids of typical texts. The authors use 256 texts of 8192 tokens.
        damping: damping of the least squares; see `ridge`.
        group_size: maximum number of channels in one Hadamard transform before quantization, the same as in the cache.
        grid: pairs of quantized numbers `[16, 2]` for all layers but the first; None: `gaussian_pairs(16)`.
        first: pairs `[256, 2]` for the first layer; None: `gaussian_pairs(256)`.
        params: the weights of a bare `Model`.

    Returns:
        The option `predictors` of `decodax.caches.aqua_kv`.

    Raises:
        ValueError: no texts, or layers of different shapes.
    """
    samples = observed(lm, texts, params)
    if len({(own.keys.shape, own.values.shape) for own in samples}) > 1:
        raise ValueError("lm: got a model whose layers have keys and values of different shapes, takes one shape")
    grid, first = (Constant(np.asarray(gaussian_pairs(n) if given is None else given, np.float32))
                   for n, given in ((16, grid), (256, first)))

    def again(x: np.ndarray, pairs: HIGGS) -> np.ndarray:
        part = lambda x: np.asarray(pairs.decode(pairs.encode(jnp.asarray(x)), x.shape[1], jnp.float32))
        return np.concatenate([part(some) for some in np.array_split(x, -(-len(x) // 8192))])

    maps: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    below: tuple[np.ndarray, np.ndarray] | None = None
    for own in samples:
        keys, values = own.keys.reshape(len(own.keys), -1), own.values.reshape(len(own.values), -1)
        if below is None:
            below = again(keys, HIGGS(first, group_size)), again(values, HIGGS(first, group_size))
            maps[0].append(np.zeros((keys.shape[1] + 1, keys.shape[1]), np.float32))
            maps[1].append(np.zeros((keys.shape[1] + values.shape[1] + 1, values.shape[1]), np.float32))
            continue
        maps[0].append(ridge(below[0], keys, damping))
        said = affine(below[0], maps[0][-1])
        keys = said + again(keys - said, HIGGS(grid, group_size))
        inputs = np.concatenate([keys, below[1]], 1)
        maps[1].append(ridge(inputs, values, damping))
        said = affine(inputs, maps[1][-1])
        below = keys, said + again(values - said, HIGGS(grid, group_size))
    return Predictors(Constant(np.stack(maps[0])), Constant(np.stack(maps[1])), grid, first)
