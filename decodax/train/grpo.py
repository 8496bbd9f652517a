"""The loss of group-relative policy gradients (GRPO: Shao et al., 2024, "DeepSeekMath").

`scripts/train.py grpo` is a complete example: it samples with `decodax.generate` and the trainer's own arrays.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from decodax.models.adapters import apply

Tree = Any


class GrpoBatch(NamedTuple):
    """Texts to learn from."""

    tokens: Array           # i32[R, T], prompt and answer
    answers: Array          # f32[R, T - 1], 1 if the next token belongs to the answer
    old: Array              # f32[R, T - 1], log-probability of the next token when it was drawn
    advantages: Array       # f32[R]


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns rewards relative to their groups, `f32[P, G]`; 0 in a group whose rewards are equal.

    >>> advantages(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    spread = rewards.std(1, keepdims=True)
    return ((rewards - rewards.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1)).astype(np.float32)


def logprobs(network: Any, weights: Tree, tokens: Array) -> Array:
    """Returns the log-probability of each token after the first, `f32[R, T - 1]`, by the trainer's own forward."""
    log_p = jax.nn.log_softmax(network.forward(weights, tokens[:, :-1]), -1)
    return jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]


def loss(trained: Tree, frozen: Tree, network: Any, lora: bool, batch: GrpoBatch, clip: float, kl: float
         ) -> tuple[Array, Array]:
    """Returns the loss and the largest distance of a ratio from 1."""
    weights = apply(frozen, trained) if lora else trained
    new = logprobs(network, weights, batch.tokens)
    ratio = jnp.exp(new - batch.old)
    advantage = batch.advantages[:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    if kl:      # the estimate that is never negative
        lead = logprobs(network, frozen, batch.tokens) - new
        gain -= kl * (jnp.exp(lead) - lead - 1)
    count = jnp.maximum(batch.answers.sum(1), 1)
    off = jnp.max(jnp.abs(ratio - 1) * batch.answers)
    return -((gain * batch.answers).sum(1) / count).mean(), off


@partial(jax.jit, static_argnums=(0, 1, 2, 7, 8), donate_argnums=(4,))
def update(tx: Any, network: Any, lora: bool, trained: Tree, opt: Tree, frozen: Tree, batch: GrpoBatch, clip: float,
           kl: float) -> tuple[Tree, Tree, Array]:
    """Does one step of the optimizer and returns (weights, state, largest distance of a ratio from 1)."""
    (_, off), grads = jax.value_and_grad(loss, has_aux=True)(trained, frozen, network, lora, batch, clip, kl)
    change, opt = tx.update(grads, opt, trained)
    return optax.apply_updates(trained, change), opt, off
