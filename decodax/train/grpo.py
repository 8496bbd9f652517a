"""The loss of group-relative policy gradients (GRPO: Shao et al., 2024, "DeepSeekMath"), and rewards for models that
are used with best-of-N (InfAlign-CTRL: Balashankar et al., 2024).

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

from decodax.common.quantiles import quantiles, transformed
from decodax.models.adapters import apply

Tree = Any


class GrpoBatch(NamedTuple):
    """Sampled answers to learn from: `R` rows of `T` tokens, with the log-probabilities at which they were drawn and
    the advantage of each answer over others to the same prompt."""

    tokens: Array           # i32[R, T], prompt and answer
    answers: Array          # f32[R, T - 1], 1 if the next token belongs to the answer
    old: Array              # f32[R, T - 1], log-probability of the next token when it was drawn
    advantages: Array       # f32[R]


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns the rewards of `G` answers to each of `P` prompts, `f[P, G]`, minus their mean and divided by their
    standard deviation in the group, `f32[P, G]`; 0 in a group whose rewards are equal.

    >>> advantages(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    spread = rewards.std(1, keepdims=True)
    return ((rewards - rewards.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1)).astype(np.float32)


def align(rewards: np.ndarray, references: np.ndarray, t: float) -> np.ndarray:
    """Returns rewards for the training of a model that is used with best-of-N (InfAlign-CTRL: Balashankar et al.,
    2024): each is calibrated by its quantile among the rewards of samples of the first model, then transformed. Train
    with a weight of the divergence from that model (`kl` of `loss`).

    Args:
        rewards: rewards of `G` answers to each of `P` prompts, `f[P, G]`.
        references: rewards of `K` answers of the first model to the same prompts, `f[P, K]`.
        t: strength of the transform `(exp(t c) - 1) / t`: above 0 for best-of-N, so that the best answers of a prompt
            count most; below 0 for a model that is robust against the worst of N; 0: the quantiles themselves, for
            single answers.

    Returns:
        `f64[P, G]`.

    >>> align(np.array([[0.0, 1.0]]), np.array([[0.0, 0.5, 0.5, 1.0]]), 0.0).tolist()
    [[0.25, 1.0]]
    """
    return transformed(np.stack([quantiles(own, others) for own, others in zip(rewards, references, strict=True)]), t)


def logprobs(network: Any, weights: Tree, tokens: Array) -> Array:
    """Returns the log-probability of each token after the first, `f32[R, T - 1]`, given the tokens before it, for
    `tokens`, `i32[R, T]`, by a forward pass without a cache."""
    log_p = jax.nn.log_softmax(network.forward(weights, tokens[:, :-1]), -1)
    return jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]


def loss(trained: Tree, frozen: Tree, network: Any, lora: bool, batch: GrpoBatch, clip: float, kl: float
         ) -> tuple[Array, Array]:
    """Returns GRPO's loss, `f32[]`, and the largest `|r - 1|` over tokens of answers, `f32[]`, where `r` is a token's
    probability divided by that at which it was drawn.

    Ratios are clipped to `1 - clip` .. `1 + clip`; `kl` weighs the divergence from the model with the weights `frozen`.
    `trained` are weights, or with `lora` an adapter beside `frozen`.
    """
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
    """Does one step of the optimizer `tx` with state `opt` on `loss`. Returns the new `trained`, the new state, and the
    largest `|r - 1|` as `loss` does. The other arguments are those of `loss`."""
    (_, off), grads = jax.value_and_grad(loss, has_aux=True)(trained, frozen, network, lora, batch, clip, kl)
    change, opt = tx.update(grads, opt, trained)
    return optax.apply_updates(trained, change), opt, off
