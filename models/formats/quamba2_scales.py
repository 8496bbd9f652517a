"""Calibration of Quamba2 on texts: sizes of channels, their order and clusters, and the scales of activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.window import Window, causal
from decodax.models.formats.integers import rotate
from decodax.models.recurrent.mamba2 import Mamba2, Mamba2Config, mixed, projected
from decodax.models.transformer import Weights
from decodax.models.weight_source import nested

LEAST = 1e-5
"""Lower bound of the maximum from which a scale is computed."""


def arranged(mean: np.ndarray, heads: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts and clusters the channels of a layer.

    Args:
        mean: `f[G, H / G, P]`, the mean absolute value of each channel.
        heads: maximum number of clusters of heads.
        channels: maximum number of clusters of channels.

    Returns:
        The index of the channel at each place, `i64[G, H / G, P]`, and the number of its cluster, `i64[G, H / G, P]`.
    """
    G, H, P = mean.shape
    order = np.arange(mean.size).reshape(mean.shape)
    by_size = np.argsort(mean, -1, kind="stable")
    order, sizes = np.take_along_axis(order, by_size, -1), np.take_along_axis(mean, by_size, -1).astype(np.float32)
    size: np.ndarray = sizes / np.maximum(np.linalg.norm(sizes, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    found, count = np.zeros(mean.shape, np.int64), 0
    for g in range(G):
        label = ward(size[g], min(heads, H))
        place = np.argsort(label, kind="stable")
        order[g], size[g], label = order[g][place], size[g][place], label[place]
        for each in range(label.max() + 1):
            own = label == each
            # Channels are sorted in each head, so clusters are intervals.
            inside = np.maximum.accumulate(lloyd(size[g][own].T, min(channels, P)))
            found[g, own] = count + inside
            count += min(channels, P)
    return order, found


def ward(x: np.ndarray, count: int) -> np.ndarray:
    """Clusters the rows of `x` (`f[n, d]`) into `count` clusters by Ward's method. Returns the cluster of each row,
    `i64[n]`, numbered in the order of their first rows."""
    clusters = [([i], row.astype(np.float64)) for i, row in enumerate(x)]
    while len(clusters) > count:
        mean, size = np.array([m for _, m in clusters]), np.array([len(i) for i, _ in clusters])
        grown = np.square(mean[:, None] - mean).sum(-1) * size[:, None] * size / (size[:, None] + size)
        grown[np.tril_indices(len(clusters))] = np.inf
        a, b = np.unravel_index(np.argmin(grown), grown.shape)
        rows = clusters[a][0] + clusters[b][0]
        clusters[a] = (rows, x[rows].astype(np.float64).mean(0))
        del clusters[b]
    label = np.empty(len(x), np.int64)
    for number, (rows, _) in enumerate(sorted(clusters, key=lambda each: min(each[0]))):
        label[rows] = number
    return label


def lloyd(x: np.ndarray, count: int) -> np.ndarray:
    """Clusters the rows of `x` (`f[n, d]`) into at most `count` clusters by k-means, started from evenly spaced rows.
    Returns the cluster of each row, `i64[n]`."""
    x = x.astype(np.float64)
    centers = x[::max(1, len(x) // count)][:count].copy()
    label = np.full(len(x), -1)
    for _ in range(300):
        old, before = label, centers.copy()
        label = np.square(x[:, None] - centers).sum(-1).argmin(-1)
        if (label == old).all():
            break
        for i in range(len(centers)):
            if (label == i).any():
                centers[i] = x[label == i].mean(0)
        if np.square(centers - before).sum() <= 1e-4 * x.var(0).mean():
            label = np.square(x[:, None] - centers).sum(-1).argmin(-1)
            break
    return label


def scales_of(c: Mamba2Config, seen: Mapping[str, np.ndarray], clusters: np.ndarray | None) -> dict[str, np.ndarray]:
    """Returns the scales of a layer's activations from its statistics, a result of `watched`; without `clusters`, those
    of the output head."""
    if clusters is None:
        return {"head": scale_of(seen["head"])}
    wide = lambda names: np.concatenate([np.full(n, scale_of(seen[name]), np.float32) for name, n in names])
    state = c.groups * c.state
    flat = clusters.reshape(-1)
    most, inner = np.zeros(flat.max() + 1), np.zeros((flat.max() + 1, c.state))
    np.maximum.at(most, flat, seen["x out"].reshape(-1))
    np.maximum.at(inner, flat, seen["state"].swapaxes(1, 2).reshape(-1, c.state))
    conv = np.concatenate([scale_of(most)[flat], np.repeat(scale_of(seen["B out"]), c.state),
                           np.repeat(scale_of(seen["C out"]), c.state)])
    return {"in": scale_of(seen["in"]), "out": scale_of(seen["out"]), "conv": conv,
            "outs": wide([("z", c.inner), ("x", c.inner), ("B", state), ("C", state), ("dt", c.heads)]),
            "into": wide([("x", c.inner), ("B", state), ("C", state)]),
            "state": scale_of(inner)[flat].reshape(c.heads, c.head_dim, c.state).swapaxes(1, 2)}


def watched(c: Mamba2Config, leaves: Mapping[str, np.ndarray], tokens: np.ndarray,
            report: Callable[[float], None] = lambda done: None) -> list[dict[str, np.ndarray]]:
    """Runs the network made by `fused` on texts and returns statistics of activations: a dict for each layer and one
    for the output head.

    The statistics are maximum absolute values; "mean" is, for each channel of `x`, the maximum over sequences of the
    mean absolute value. States are those at the end of a sequence.
    """
    params = nested({path: jnp.asarray(leaf, jnp.float32) for path, leaf in leaves.items()})
    model = _Watched(c)

    @jax.jit
    def one(params: Weights, row: Array) -> list[dict[str, Array]]:
        found: list[dict[str, Array]] = []
        window = causal(row, jnp.zeros(len(row), jnp.int32)).replace(is_prefill=True)
        cache: Any = model.init_cache(len(row), 0)
        out = dataclasses.replace(model, found=_Found(found)).apply(params, window, cache)
        after = cache.commit(out.entries, window.positions)
        for own, state in zip(found, after.states, strict=True):
            own["state"] = jnp.abs(state).max(0)
        return [*found, {"head": jnp.abs(out.hidden).max()}]

    total: Any = None
    for i, row in enumerate(tokens):
        own = one(params, jnp.asarray(row[None], jnp.int32))
        total = own if total is None else jax.tree.map(jnp.maximum, total, own)
        report((i + 1) / len(tokens))
    return jax.tree.map(lambda a: np.asarray(a, np.float32), total)


class _Found:
    """A list that is compared by identity."""

    def __init__(self, found: list[dict[str, Array]]):
        self.found = found


@dataclasses.dataclass(frozen=True)
class _Watched(Mamba2):
    """A model that records statistics of its layers in the list `found` while it is traced."""

    found: Any = None

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        c = self.config
        z, into, dt = projected(c, p, x)
        parts = jnp.split(into, [c.inner, c.inner + c.groups * c.state], -1)
        own = {"in": x, "z": z, "dt": dt, "x": parts[0], "B": parts[1], "C": parts[2]}
        found = {name: jnp.abs(a).max() for name, a in own.items()}

        def note(y: Array) -> Array:
            u, B, C = (jnp.abs(a) for a in jnp.split(y, [c.inner, c.inner + c.groups * c.state], -1))
            found.update({"x out": u.max((0, 1)), "mean": u.mean((0, 1))})
            for name, a in (("B out", B), ("C out", C)):
                found[name] = a.max((0, 1)).reshape(c.groups, -1).max(-1)
            return y

        def out(y: Array) -> Array:
            y = rotate(y)
            found["out"] = jnp.abs(y).max()
            return y

        made = mixed(c, p, layer, x, window, cache, note, out)
        self.found.found.append(found)
        return made


def scale_of(most: Any) -> Any:
    """Returns the step size of 8-bit integers for numbers up to `most`."""
    return np.maximum(most, LEAST).astype(np.float32) / np.float32(127)
