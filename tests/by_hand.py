"""A Llama in NumPy and float64, layer by layer: an independent reference of models that differ in what a token sees."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decodax.models import DecoderConfig


def logits(config: DecoderConfig, params: Any, tokens: Any, positions: Any = None,
           sees: Callable[[int, np.ndarray], np.ndarray] | None = None) -> np.ndarray:
    """Returns `f64[T, V]`.

    Args:
        tokens: `[T]`. positions: `[T]` of the tokens; None: 0, 1, 2, ... sees: which tokens those of a layer see,
            `bool[T, T]`, by the layer's number and its keys `[T, G, d]`; None: those before them, within the layer's
            window.
    """
    w, T, half = jax.tree.map(lambda x: np.asarray(x, np.float64), params), len(tokens), config.head_dim // 2
    at = np.arange(T) if positions is None else np.asarray(positions)
    norm = lambda x, scale: x / np.sqrt((x ** 2).mean(-1, keepdims=True) + config.norm.eps) * scale
    heads = lambda x: x.reshape(T, -1, config.head_dim)
    angle, made = at[:, None, None] * 10_000.0 ** (-np.arange(half) / half), {}

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = w["embed"][np.asarray(tokens)]
    for i, layer in enumerate(config.layers):
        own = w["layers"][str(i)]
        y = norm(x, own["attn_in"]["scale"])
        q = turn(heads(y @ own["attn"]["q"]["kernel"]))
        if layer.reads is None:
            made[i] = turn(heads(y @ own["attn"]["k"]["kernel"])), heads(y @ own["attn"]["v"]["kernel"])
        k, v = made[i if layer.reads is None else layer.reads]
        far = at[:, None] - at
        seen = (far >= 0) & (far < (layer.sliding or T)) if sees is None else sees(i, k)
        k, v = (np.repeat(z, config.heads // config.kv_heads, 1) for z in (k, v))
        scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(T, -1) @ own["attn"]["o"]["kernel"]
        y = norm(x, own["mlp_in"]["scale"])
        gate, up = (y @ own["mlp"][name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp"]["down"]["kernel"]
    return norm(x, w["norm"]["scale"]) @ w["lm_head"]["kernel"]
