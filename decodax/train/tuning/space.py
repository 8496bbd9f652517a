"""The tuning of SPACE ("Generation Meets Verification: Accelerating Large Language Model Inference with Smart Parallel
Auto-Correct Decoding", Yi et al., 2024), semi-autoregressive fine-tuning: the model learns to predict several tokens at
once at mask tokens, and keeps its next tokens.

A row is an ordinary example with the probability `plain`. Otherwise masks stand after a random place of its target in
place of the next tokens, and the mask after `j` others predicts the token `j + 2` places after the text before them, as
in decoding (`space`), where the last token of the text predicts the next one itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.spans import random_spans

Tree = Any


@dataclass(frozen=True)
class SemiAutoregressiveLoss:
    """The training loss of SPACE, an `Objective`: cross-entropy of next tokens, and in most rows of the tokens that
    mask tokens after a random place of the target stand for; the mean over rows of their means. The third argument of a
    call is a random key.

    Attributes:
        network: the trained network.
        mask: id of the mask token, which must not occur in texts.
        length: number of masks.
        plain: probability that a row is an ordinary example.
        dtype: dtype of the computation.

    Raises:
        ValueError: a negative id, no mask, or a `plain` that is no probability.
    """

    network: Any
    mask: int
    length: int = 5
    plain: float = 0.5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.mask < 0 or self.length < 1:
            raise ValueError(f"mask, length: got {self.mask} and {self.length}, take an id, and at least 1")
        if not 0 <= self.plain <= 1:
            raise ValueError(f"plain: got {self.plain}, takes a probability")

    def spans(self, key: Array, batch: tuple[Array, ...]) -> tuple[Array, Array]:
        """Returns the first position of the masks in each row and the position after the last one, `i32[B]` each."""
        learned = batch[1]
        # the last token of a target is predicted by the mask before it
        return random_spans(key, learned & jnp.pad(learned[:, 1:], ((0, 0), (0, 1))), self.length)

    def ordinary(self, drawn: Array, start: Array, end: Array) -> Array:
        """Returns True for rows that are trained as ordinary examples, without masks, `bool[B]`: here the rows that are
        `drawn` (`bool[B]`). A derived class may add rows by the bounds of their masks, `start` and `end`, `i32[B]`."""
        return drawn

    def __call__(self, params: Tree, batch: tuple[Array, ...], extra: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", and those of ordinary rows and of masks.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned.
            extra: a random key.
        """
        tokens, learned, *_ = batch
        which, place = jax.random.split(extra)
        start, end = self.spans(place, batch)
        plain = self.ordinary(jax.random.bernoulli(which, self.plain, (len(tokens),)), start, end)
        at = jnp.arange(tokens.shape[1] - 1)
        masks = (at >= start[:, None]) & (at < end[:, None]) & ~plain[:, None]
        logits = self.network.forward(cast(params, self.dtype), jnp.where(masks, self.mask, tokens[:, :-1]))
        counted = jnp.where(plain[:, None], learned[:, 1:], masks)
        losses = jnp.where(counted, cross_entropy(logits, tokens[:, 1:]), 0)
        rows = losses.sum(1) / jnp.maximum(counted.sum(1), 1)
        mean = lambda some: jnp.where(some, rows, 0).sum() / jnp.maximum(some.sum(), 1)
        loss = mean(counted.any(1))
        return loss, {"loss": loss, "plain": mean(plain), "masks": mean(~plain & counted.any(1))}


__all__ = ["SemiAutoregressiveLoss"]
