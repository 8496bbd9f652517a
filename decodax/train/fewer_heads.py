"""Reduces the number of key/value heads of a model ("Effectively Compress KV Heads for LLM", Yu et al., 2024).

Each group of adjacent heads becomes one head. Its values are the concatenated values of the group, projected to the
directions with the largest squared values on texts (a singular value decomposition). The projection is folded into the
value kernel, and its transpose into the output kernel. Keys and queries are treated in the same way. The result is an
ordinary network with grouped queries and a smaller cache.

A rotary embedding lies between the key kernel and the cache, and a projection can be folded into the kernel only if it
commutes with rotations. So each rotary frequency is projected separately, as a complex number: of the numbers that the
heads of a group have at a frequency, the direction with the largest squared values is kept. A rotation multiplies all
of them by the same phase, so this is the best such projection of keys before and after it. Channels without rotation
are projected as values are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.loaded import Loaded, network_name
from decodax.models import DecoderConfig, Rope, Transformer
from decodax.train.samples import observed

Bases = tuple[np.ndarray, np.ndarray]
"""Matrices of keys, `f64[G, d, d]`, and of values. Heads are multiplied by them before the heads of a group are summed.
"""


def fit_kv_heads(lm: Any, texts: Sequence[Sequence[int]], kv_heads: int) -> Any:
    """Reduces a model to `kv_heads` key/value heads, by projections that are computed from its keys and values on
    texts.

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer` whose weights are arrays and whose queries and
            keys are not normalized.
        texts: token ids of typical texts.
        kv_heads: the new number of key/value heads, a divisor of the present one.

    Returns:
        `lm` with another network and other weights, in the dtypes of the old ones.

    Raises:
        ValueError: no texts, a wrong number of heads, or a model whose heads cannot be merged.
    """
    config = _checked(lm, kv_heads)
    group = config.kv_heads // kv_heads
    bases = []
    for layer, own in zip(config.own, observed(lm, texts), strict=True):
        bases.append((_keys(own.keys.astype(np.float64), group, config.layers[layer].rope),
                      _main(own.values.astype(np.float64), group)))
    return _folded(lm, kv_heads, bases, bases)


def mean_kv_heads(lm: Any, kv_heads: int) -> Any:
    """Reduces a model to `kv_heads` key/value heads by averaging the kernels in each group, as a start for further
    training ("GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints", Ainslie et al.,
    2023).

    Args:
        lm: a model, as in `fit_kv_heads`.
        kv_heads: the new number of key/value heads, a divisor of the present one.

    Returns:
        `lm` with another network and other weights, in the dtypes of the old ones.

    Raises:
        ValueError: a wrong number of heads, or a model whose heads cannot be merged.
    """
    config = _checked(lm, kv_heads)
    same = np.broadcast_to(np.eye(config.head_dim), (config.kv_heads, config.head_dim, config.head_dim))
    mean = same * (kv_heads / config.kv_heads)
    return _folded(lm, kv_heads, [(mean, mean)] * len(config.own), [(same, same)] * len(config.own))


def _checked(lm: Any, kv_heads: int) -> DecoderConfig:
    if not isinstance(lm, Loaded) or not isinstance(lm.model, Transformer) or lm.diffusion is not None:
        fills = " that fills masks" if isinstance(lm, Loaded) and lm.diffusion is not None else ""
        raise ValueError(f"lm: got a {network_name(lm)}{fills}; takes what decodax.load gave of "
                         "a Transformer that reads from left to right")
    config = lm.model.config
    if config.stateful:
        raise ValueError("lm: some of its layers have linear attention or a recurrent block; takes a model whose "
                         "layers all have keys and values")
    if not isinstance(kv_heads, int) or kv_heads < 1 or config.kv_heads % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads!r}, takes a divisor of the {config.kv_heads} that there are")
    if config.qk_norm is not None or config.value_norm is not None or config.values_of_key > 1 or (
            config.value_dim is not None) or any(
            layer.sinks or layer.heads or layer.kv_heads or layer.head_dim or layer.keys_as_values
            for layer in config.layers):
        raise ValueError("lm: got a model with norms of queries, keys or values, with sinks of its attention scores, "
                         "with more heads of values than of keys, or with heads that differ; takes one without")
    for layer in lm.params["layers"].values():
        for part in layer["attn"].values():
            if not isinstance(part["kernel"], Array | np.ndarray):
                raise ValueError("lm: got weights that are packed or adapted, takes arrays; pack them afterwards")
    return config


def _main(x: np.ndarray, group: int) -> np.ndarray:
    """Returns the `d` main directions of the concatenated heads of each group, `[G, d, d]`, from samples `[N, G, d]`.
    """
    N, G, d = x.shape
    parts = x.reshape(N, G // group, group * d).transpose(1, 2, 0)
    squares = parts @ parts.conj().swapaxes(1, 2)
    # the last eigenvectors; all of them for groups of one head
    return np.linalg.eigh(squares)[1][:, :, ::-1][:, :, :d].reshape(G, d, d)


def _keys(x: np.ndarray, group: int, rope: Rope | None) -> np.ndarray:
    """Returns the main directions of keys, as `_main` does, by projections that commute with rotations."""
    _, G, d = x.shape
    made, turned = np.zeros((G, d, d)), 0 if rope is None else rope.width
    if turned < d:
        made[:, turned:, turned:] = _main(x[:, :, turned:], group)
    for i in range(turned // 2):
        a, b = (2 * i, 2 * i + 1) if rope is not None and rope.interleaved else (i, i + turned // 2)
        numbers = x[:, :, a] + 1j * x[:, :, b]
        factor = _main(numbers[:, :, None], group)[:, 0, 0].conj()
        made[:, a, a] = made[:, b, b] = factor.real
        made[:, b, a], made[:, a, b] = -factor.imag, factor.imag
    return made


def _folded(lm: Any, kv_heads: int, made: Sequence[Bases], read: Sequence[Bases]) -> Any:
    """Returns the model with `kv_heads` key/value heads. Its keys and values are sums over groups of the old ones
    multiplied by the bases `made`; its queries and outputs are multiplied by the bases `read`."""
    c: DecoderConfig = lm.model.config
    place = {layer: i for i, layer in enumerate(c.own)}
    heads = np.arange(c.heads) // (c.heads // c.kv_heads)
    params = jax.tree.map(lambda x: x, lm.params)

    def turn(part: dict[str, Any], bases: np.ndarray, fewer: bool) -> dict[str, Any]:
        """Multiplies a kernel `[D, n d]`, and its bias, by the bases; with `fewer`, sums over the heads of a group."""

        def one(x: Array) -> Array:
            whole = np.asarray(x, np.float64).reshape(-1, len(bases), c.head_dim)
            whole = np.einsum("xgd,gde->xge", whole, bases)
            if fewer:
                whole = whole.reshape(len(whole), kv_heads, -1, c.head_dim).sum(2)
            return jnp.asarray(whole.reshape(*x.shape[:-1], -1), x.dtype)

        return {name: one(x) for name, x in part.items()}

    for i, layer in enumerate(c.layers):
        attn = params["layers"][str(i)]["attn"]
        of = place[i if layer.reads is None else layer.reads]
        attn["q"] = turn(attn["q"], read[of][0][heads], False)
        attn["o"] = {**attn["o"], "kernel": turn({"kernel": attn["o"]["kernel"].T}, read[of][1][heads],
                                                 False)["kernel"].T}
        if layer.reads is None:
            attn["k"], attn["v"] = turn(attn["k"], made[of][0], True), turn(attn["v"], made[of][1], True)
    model = dataclasses.replace(lm.model, config=dataclasses.replace(c, kv_heads=kv_heads))
    # the files that it was loaded from have another number of heads
    return dataclasses.replace(lm, model=model, params=params, directory=None)
