"""Fits the temperatures of a block head's predicted acceptance to texts (DSpark: Cheng et al., 2026).

A confidence head that was trained with few tokens, or for other texts, says too much or too little. One temperature for
each draft of a block corrects this (temperature scaling; Guo et al., 2017), and the lengths that go by the predicted
survival are then right.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.block import BlockHead
from decodax.train.drafting.blocks import AnchoredBlocks

RANGE = 0.1, 10.0
"""Lowest and highest temperature."""


def fit_confidence(lm: Any, drafter: TrainedDrafter, tokens: Any, *, anchors: int = 64,
                   rows: int = 8) -> TrainedDrafter:
    """Returns the drafter with temperatures at which its predicted acceptance has the least cross-entropy on texts.

        drafter = fit_confidence(lm, drafter, texts)
        dx.generate(lm, prompts, algorithm="dspark:threshold=none", draft=drafter)

    Args:
        lm: the target, a result of `decodax.load`.
        drafter: a drafter with a confidence head, from `decodax.load_drafter`.
        tokens: `i32[B, T]`, texts of the target's tokens that are typical for later use.
        anchors: number of blocks at random places of a text.
        rows: number of texts in a forward pass.

    Raises:
        ValueError: a drafter without a confidence head, or texts that are too short.
    """
    head, texts = drafter.head, np.asarray(tokens, np.int32)
    if not isinstance(head, BlockHead) or head.confidence is None:
        raise ValueError(f"drafter: got one of {drafter.system!r} without a confidence head, takes one of 'dspark'")
    if texts.ndim != 2 or texts.shape[1] < head.block + 2:
        raise ValueError(f"tokens: got an array of shape {texts.shape}, takes texts of at least {head.block + 2} "
                         "tokens")
    bare = dataclasses.replace(head, temperatures=())
    ids = None if drafter.ids is None else tuple(np.asarray(drafter.ids).tolist())
    objective = AnchoredBlocks(lm.model, bare, anchors=anchors, ids=ids)
    found = [_predicted(objective, drafter.params, jnp.asarray(texts[i:i + rows]), lm.params)
             for i in range(0, len(texts), rows)]
    logits, accepted, live = (jnp.concatenate([x.reshape(-1, head.longest) for x in some])
                              for some in zip(*found, strict=True))
    fitted = jax.vmap(fitted_temperature, 1)(logits, accepted, live)
    return dataclasses.replace(drafter, head=dataclasses.replace(
        bare, temperatures=tuple(round(float(x), 4) for x in fitted)))


@partial(jax.jit, static_argnums=0)
def _predicted(objective: AnchoredBlocks, params: Any, tokens: Array, weights: Any) -> tuple[Array, Array, Array]:
    blocks, accepted, live, _, _ = objective.blocks(params, jnp.pad(tokens, ((0, 0), (0, 1))), weights)
    assert blocks.chance is not None
    return blocks.chance, accepted, live


def fitted_temperature(logits: Array, accepted: Array, live: Array) -> Array:
    """Returns the temperature in `RANGE` at which probabilities have the least cross-entropy, `f32[]`.

    Args:
        logits: `f32[N]`, logits of the probabilities at temperature 1.
        accepted: `f32[N]`, what they predict, from 0 to 1.
        live: `bool[N]`, those that count.
    """
    def slope(inverse: Array) -> Array:
        # that of the cross-entropy by the inverse temperature, which ascends, since the cross-entropy is convex in it
        return jnp.where(live, (jax.nn.sigmoid(logits * inverse) - accepted) * logits, 0).sum()

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = jnp.sqrt(low * high)
        below = slope(middle) < 0
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = lax.fori_loop(0, 40, halve, (jnp.float32(1 / RANGE[1]), jnp.float32(1 / RANGE[0])))
    return 1 / jnp.sqrt(low * high)


__all__ = ["fit_confidence", "fitted_temperature"]
