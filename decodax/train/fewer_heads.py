"""Models with fewer heads of keys and values, made of models with more ("Effectively Compress KV Heads for LLM", Yu et
al., 2024).

Heads are taken in groups of neighbours, and each group becomes one head. Its values are those of the group side by
side, projected to the directions in which the values of texts have most of their squares (a singular value
decomposition); the projection goes into the kernel that makes values, and its transpose into the one that reads what
attention gives. Keys are projected in the same way and queries by the transpose. So the result is an ordinary network
with grouped queries and a smaller cache.

A rotary embedding stands between kernel and cache, and a projection can go into the kernel only if it commutes with
rotations. It does where each frequency is projected for itself, as a complex number: of the numbers that the heads of a
group have at a frequency, the direction with most of their squares stays. Rotation multiplies all of them by the same
phase, so this is the best such projection of keys before and behind it. Channels that are not rotated are projected
like values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.loaded import Loaded
from decodax.models import DecoderConfig, Rope, Transformer
from decodax.train.samples import observed

Bases = tuple[np.ndarray, np.ndarray]
"""Of keys `f64[G, d, d]` and of values: what each head is multiplied with before the heads of a group are added."""


def fit_kv_heads(lm: Any, texts: Sequence[Sequence[int]], kv_heads: int) -> Any:
    """The model with `kv_heads` heads of keys and values, by what those of texts have most of.

    Args:
        lm: what `decodax.load` gave: a `Transformer` that reads from left to right, with arrays as weights and without
            norms of queries and keys.
        texts: token ids of texts like those to come. kv_heads: a divisor of the number of heads that there are.

    Returns:
        The same with another network and other weights, in the dtypes of the old ones.

    Raises:
        ValueError: no texts, another number of heads, or a model whose heads cannot be put together, by name.
    """
    config = _checked(lm, kv_heads)
    group = config.kv_heads // kv_heads
    bases = []
    for layer, own in zip(config.own, observed(lm, texts), strict=True):
        bases.append((_keys(own.keys.astype(np.float64), group, config.layers[layer].rope),
                      _main(own.values.astype(np.float64), group)))
    return _folded(lm, kv_heads, bases, bases)


def mean_kv_heads(lm: Any, kv_heads: int) -> Any:
    """The model with `kv_heads` heads of keys and values, each the mean of a group: what models are trained on from
    ("GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints", Ainslie et al., 2023).

    Args, Returns, Raises: as of `fit_kv_heads`.
    """
    config = _checked(lm, kv_heads)
    same = np.broadcast_to(np.eye(config.head_dim), (config.kv_heads, config.head_dim, config.head_dim))
    mean = same * (kv_heads / config.kv_heads)
    return _folded(lm, kv_heads, [(mean, mean)] * len(config.own), [(same, same)] * len(config.own))


def _checked(lm: Any, kv_heads: int) -> DecoderConfig:
    if not isinstance(lm, Loaded) or not isinstance(lm.model, Transformer) or lm.diffusion is not None:
        fills = " that fills masks" if isinstance(lm, Loaded) and lm.diffusion is not None else ""
        raise ValueError(f"lm: got a {type(getattr(lm, 'model', lm)).__name__}{fills}; takes what decodax.load gave of "
                         "a Transformer that reads from left to right")
    config = lm.model.config
    if config.summing:
        raise ValueError("lm: some of its layers have linear attention; takes a model whose layers all have keys and "
                         "values")
    if not isinstance(kv_heads, int) or kv_heads < 1 or config.kv_heads % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads!r}, takes a divisor of the {config.kv_heads} that there are")
    if config.qk_norm is not None or config.values_of_key > 1:
        raise ValueError("lm: got a model with norms of queries and keys, or with more heads of values than of keys; "
                         "takes one without")
    for layer in lm.params["layers"].values():
        for part in layer["attn"].values():
            if not isinstance(part["kernel"], Array | np.ndarray):
                raise ValueError("lm: got weights that are packed or adapted, takes arrays; pack them afterwards")
    return config


def _main(x: np.ndarray, group: int) -> np.ndarray:
    """`[G, d, d']`: the `d` main directions of each group's heads side by side, of samples `[N, G, d]`."""
    N, G, d = x.shape
    parts = x.reshape(N, G // group, group * d).transpose(1, 2, 0)
    squares = parts @ parts.conj().swapaxes(1, 2)
    # the last eigenvectors of each; of one head alone these are all
    return np.linalg.eigh(squares)[1][:, :, ::-1][:, :, :d].reshape(G, d, d)


def _keys(x: np.ndarray, group: int, rope: Rope | None) -> np.ndarray:
    """The same for keys, of projections that commute with a rotation."""
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
    """The model whose keys and values are the sums over groups of the old ones times `made`, and whose queries and
    outputs are multiplied with `read`."""
    c: DecoderConfig = lm.model.config
    place = {layer: i for i, layer in enumerate(c.own)}
    heads = np.arange(c.heads) // (c.heads // c.kv_heads)
    params = jax.tree.map(lambda x: x, lm.params)

    def turn(part: dict[str, Any], bases: np.ndarray, fewer: bool) -> dict[str, Any]:
        """Of a kernel `[D, n d]`, and its bias."""

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
    # the files that it came from say another number of heads
    return dataclasses.replace(lm, model=model, params=params, directory=None)
