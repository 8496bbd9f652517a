"""Make Some Noise, MSN ("Make Some Noise: Unlocking Language Model Parallel Inference Capability through Noisy
Training", Wang et al., 2024): fine-tuning on inputs that are partly wrong, so that the model predicts right tokens
after wrong guesses, as Jacobi decoding needs it.

In each example a span of the inputs within the target is replaced by noise, and the tokens to predict remain the true
ones. As in the authors' code, the span begins at a random token of the target, and each token of the span is one of the
tokens before it, drawn uniformly, noise included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.exits import learned_mean
from decodax.train.tuning.spans import random_spans

Tree = Any


def with_noise(key: Array, tokens: Array, learned: Array, span: int) -> Array:
    """Returns texts with noise in place of a span of their targets, `i32[B, T]`.

    Args:
        key: a random key.
        tokens: `i32[B, T]`.
        learned: `bool[B, T]`, True for the tokens of the target.
        span: number of tokens that are replaced in a row, see `random_spans`.
    """
    begin, *draws = jax.random.split(key, span + 1)
    start, end = random_spans(begin, learned, span)
    rows = jnp.arange(len(tokens))
    for i, draw in enumerate(draws):
        at = jnp.minimum(start + i, tokens.shape[1] - 1)
        noise = tokens[rows, jax.random.randint(draw, at.shape, 0, jnp.maximum(at, 1))]
        tokens = tokens.at[rows, at].set(jnp.where(start + i < end, noise, tokens[rows, at]))
    return tokens


@dataclass(frozen=True)
class NoisyLoss:
    """The cross-entropy of true tokens after inputs with noise, an `Objective`. The third argument of a call is a
    random key.

    Attributes:
        network: the trained network.
        span: number of inputs that are replaced in a row; 5 in the authors' code.
        dtype: dtype of the computation.

    Raises:
        ValueError: a span below 1.
    """

    network: Any
    span: int = 5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.span < 1:
            raise ValueError(f"span: got {self.span}, takes at least 1")

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned.
            extra: a random key.
        """
        tokens, learned = batch
        inputs = with_noise(extra, tokens, learned, self.span)[:, :-1]
        logits = self.network.forward(cast(params, self.dtype), inputs)
        loss = learned_mean(cross_entropy(logits, tokens[:, 1:]), learned[:, 1:])
        return loss, {"loss": loss}


__all__ = ["NoisyLoss", "with_noise"]
