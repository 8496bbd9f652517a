"""Converts a model to one whose groups of layers share the attention weights of their first layer ("EchoAtt: Attend,
Copy, then Adjust for More Efficient Large Language Models", Rajabzadeh et al., 2024).

Layers share their attention weights if the cosine similarity of these weights is large; the first and the last layer
keep their own. The student begins with a copy of the model's weights. Then it is distilled in two stages: first on the
distribution of the model, the text, and the residual stream after each group; then on the text alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.prefill.listening import Listening
from decodax.core.loaded import Loaded, network_name
from decodax.core.window import causal
from decodax.models import Transformer, echo_att
from decodax.train.attention_predictor import attention_maps
from decodax.train.fitting import shuffled, train


def attention_similarity(lm: Any, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the cosine similarity of the attention maps of each two layers, averaged over heads and texts, `f64[L,
    L]`.

    Raises:
        ValueError: no texts, or a model whose attention maps are not available.
    """
    if not texts:
        raise ValueError("texts: got none, takes at least one")
    total: Any = 0.0
    for text in texts:
        maps = attention_maps(_checked(lm), 1, lm.params, jnp.asarray(text, jnp.int32))[0]
        flat = np.asarray(maps, np.float64).reshape(*maps.shape[:2], -1)
        flat /= np.linalg.norm(flat, axis=-1, keepdims=True)
        total = total + np.einsum("ahx,bhx->ab", flat, flat) / flat.shape[1]
    return total / len(texts)


def echo_groups(similarity: np.ndarray, least: float = 0.5, most: int = 2) -> tuple[tuple[int, ...], ...]:
    """Returns groups of adjacent layers whose attention maps are similar to those of their first layer.

    Args:
        similarity: `f64[L, L]`, the result of `attention_similarity`.
        least: minimum similarity of a layer to the first layer of its group.
        most: maximum number of layers in a group.

    >>> echo_groups(np.array([[1, .9, .2, .2, .2], [.9, 1, .8, .6, .2], [.2, .8, 1, .9, .2], [.2, .6, .9, 1, .2],
    ...                       [.2, .2, .2, .2, 1]]), most=3)
    ((1, 2, 3),)
    """
    groups: list[list[int]] = []
    for layer in range(1, len(similarity) - 1):
        if groups and len(groups[-1]) < most and similarity[groups[-1][0], layer] >= least:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return tuple(tuple(group) for group in groups if len(group) > 1)


def fit_echo_att(lm: Any, texts: Sequence[Sequence[int]], groups: Sequence[Sequence[int]] | None = None,
                 least: float = 0.5, most: int = 2, steps: int = 0, more: int = 0, batch: int = 4, rate: float = 1e-4,
                 soft: float = 1.0, hard: float = 1.0, hidden: float = 1.0, seed: int = 0,
                 progress: bool = False) -> Any:
    """Returns a model in which groups of layers share the attention weights of their first layer.

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer` whose weights are arrays.
        texts: token ids of texts of one length.
        groups: indices of the layers of each group. None: `echo_groups` of the similarity on the first 8 texts.
        least: minimum similarity for `echo_groups`.
        most: maximum number of layers for `echo_groups`.
        steps: number of steps of the first stage of distillation, which needs optax (`decodax[train]`).
        more: number of steps of the second stage.
        batch: number of texts in a step.
        rate: initial learning rate of AdamW, which falls to a tenth.
        soft: weight of the divergence from the model's distribution, in the first stage.
        hard: weight of the loss on the next token, in the first stage.
        hidden: weight of the relative squared error of the residual stream after each group, in the first stage.
        seed: seed of the order of texts.
        progress: True shows progress bars.

    Returns:
        `lm` with another network and other weights, in the dtypes of the old ones.

    Raises:
        ValueError: no texts, texts of different lengths, no layers to share, or another kind of model.
    """
    model = _checked(lm)
    if len({len(text) for text in texts}) != 1 or len(texts[0]) < 2:
        raise ValueError(f"texts: got lengths {sorted({len(text) for text in texts})[:3]}, takes texts of one length")
    if min(steps, more) < 0 or batch < 1 or rate <= 0:
        raise ValueError(f"steps, more, batch, rate: got {steps}, {more}, {batch} and {rate}, takes 0 or more of "
                         "steps, 1 or more of texts, and a rate above 0")
    if groups is None:
        groups = echo_groups(attention_similarity(lm, texts[:8]), least, most)
        if not groups:
            raise ValueError(f"least: got {least}, which no two neighbouring layers reach but the first and the last")
    student = dataclasses.replace(model, config=echo_att(model.config, groups))
    params = jax.tree.map(lambda x: x, lm.params)
    for i, layer in enumerate(student.config.layers):
        if layer.echoes is not None:
            attn = params["layers"][str(i)]["attn"]
            params["layers"][str(i)]["attn"] = {name: attn[name] for name in ("v", "o")}
    if steps or more:
        params = _distilled(lm, student, params, tuple(max(group) for group in groups), texts, (steps, more), batch,
                            rate, (soft, hard, hidden), seed, progress)
    # the files that it came from say that each layer has its own
    return dataclasses.replace(lm, model=student, params=params, directory=None)


def _checked(lm: Any) -> Transformer:
    if not isinstance(lm, Loaded) or not isinstance(lm.model, Transformer) or lm.diffusion is not None:
        raise ValueError(f"lm: got a {network_name(lm)}; takes what decodax.load gave of a "
                         "Transformer that reads from left to right")
    config = lm.model.config
    if config.shared or config.attention_softcap is not None or any(
            layer.sliding is not None or layer.sinks or (layer.rope is not None and layer.rope.chunks)
            for layer in config.layers):
        raise ValueError("lm: got a model with sliding windows, chunks, a soft cap or sinks of its scores, or layers "
                         "that share something, takes one without")
    for layer in lm.params["layers"].values():
        for part in layer["attn"].values():
            if not isinstance(part.get("kernel", part.get("scale")), Array | np.ndarray):
                raise ValueError("lm: got weights that are packed or adapted, takes arrays; pack them afterwards")
    return lm.model


def _distilled(lm: Any, student: Transformer, params: Any, ends: tuple[int, ...], texts: Sequence[Sequence[int]],
               steps: tuple[int, int], batch: int, rate: float, weigh: tuple[float, float, float], seed: int,
               progress: bool) -> Any:
    import optax  # only for those who train

    adam = optax.chain(optax.clip_by_global_norm(1.0),
                       optax.adamw(optax.cosine_decay_schedule(rate, sum(steps), 0.1), weight_decay=0.01))

    def loss(weigh: tuple[float, float, float], params: Any, teacher: Any, tokens: Array) -> Array:
        window = causal(tokens, jnp.zeros(len(tokens), jnp.int32))
        out = student.apply(params, window, Listening())
        own = jax.nn.log_softmax(out.logits()[:, :-1], -1)
        total = -weigh[1] * jnp.take_along_axis(own, tokens[:, 1:, None], -1).mean()
        if weigh[0] or weigh[2]:
            wanted = lm.model.apply(teacher, window, Listening())
            log = jax.nn.log_softmax(wanted.logits()[:, :-1], -1)
            total += weigh[0] * (jnp.exp(log) * (log - own)).sum(-1).mean()
            assert out.layers is not None and wanted.layers is not None
            for layer in ends:
                x, y = (states[layer].astype(jnp.float32) for states in (out.layers, wanted.layers))
                total += weigh[2] / len(ends) * jnp.square(x - y).mean() / jnp.square(y).mean()
        return total

    every = np.asarray(texts, np.int32)
    batches = ((lm.params, every[rows]) for rows in shuffled(len(texts), batch, np.random.default_rng(seed)))
    params, state = train(functools.partial(loss, weigh), params, batches, adam, steps[0], progress and "distilling")
    return train(functools.partial(loss, (0.0, 1.0, 0.0)), params, batches, adam, steps[1],
                 progress and "training on texts", state)[0]
