"""Batch-scheduled sampling ("Bridging the Training-Inference Gap in LLMs by Leveraging Self-Generated Tokens", Cen et
al., 2024): in the inputs, tokens of the target are replaced at random by those of an answer that the model itself has
written before the training, and the tokens to predict remain those of the target. So the model learns to continue texts
of its own.

The share of replaced tokens rises linearly during the run, from 0 to `share`.

The paper's second method, reference-answer-based correction (RAC), teaches the model to correct itself: `corrections`
makes examples in which its own answer precedes the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import decodax as dx
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.examples import Example, ExampleRows
from decodax.train.tuning.exits import learned_mean

Tree = Any


@dataclass(frozen=True)
class ScheduledSamplingLoss:
    """The cross-entropy of true tokens after inputs that are partly the model's own, an `Objective`. The third argument
    of a call is a random key and the step, `i32[]`.

    Attributes:
        network: the trained network.
        steps: number of steps of the run.
        share: share of the target's tokens that are replaced at the last step.
        dtype: dtype of the computation.

    Raises:
        ValueError: a share that is none, or no steps.
    """

    network: Any
    steps: int
    share: float = 0.5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.steps < 1:
            raise ValueError(f"share, steps: got {self.share} and {self.steps}, take 0 to 1, and at least 1")

    def __call__(self, params: Tree, batch: tuple[Array, Array, Array],
                 extra: tuple[Array, Array]) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`; `bool[B, T + 1]`, True for tokens that are learned; and the model's own
                tokens in their place, `i32[B, T + 1]`.
            extra: a random key and the step.
        """
        (tokens, learned, own), (key, step) = batch, extra
        share = self.share * step / max(self.steps - 1, 1)
        replaced = learned & jax.random.bernoulli(key, share, tokens.shape)
        inputs = jnp.where(replaced, own, tokens)[:, :-1]
        logits = self.network.forward(cast(params, self.dtype), inputs)
        loss = learned_mean(cross_entropy(logits, tokens[:, 1:]), learned[:, 1:])
        return loss, {"loss": loss}


def corrections(rows: ExampleRows, own: np.ndarray, between: Sequence[int]) -> list[Example]:
    """Returns examples for RAC: the prompt and the model's own answer, then `between` and the reference, which are
    learned.

    Args:
        rows: `N` examples with one target each.
        own: `i32[N, T + 1]`, the rows with the model's own tokens in place of the targets.
        between: ids of the words that introduce a correction.
    """
    made = []
    for tokens, learned, answered in zip(rows.tokens, rows.learned, own, strict=True):
        target = tokens[learned].tolist()
        said = [*tokens[:learned.argmax()].tolist(), *answered[learned].tolist()]
        made.append(Example((*said, *between, *target), len(said)))
    return made


def own_targets(lm: Any, rows: ExampleRows, together: int = 32) -> np.ndarray:
    """Returns rows with what a model writes after their prompts at temperature 1 in place of the targets, `i32[N, T +
    1]`.

    Args:
        lm: the model.
        rows: `N` examples.
        together: number of prompts that are continued together.
    """
    made = rows.tokens.copy()
    for at in range(0, len(rows), together):
        some = rows[at:at + together]
        firsts, sizes = some.learned.argmax(1), some.learned.sum(1)
        out = dx.generate(lm, [row[:first].tolist() for row, first in zip(some.tokens, firsts, strict=True)],
                          max_new_tokens=int(sizes.max()), eos_token_id=[], temperature=1.0)
        for i, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            made[at + i, first:first + size] = np.asarray(out.tokens)[i, :size]
    return made


__all__ = ["ScheduledSamplingLoss", "corrections", "own_targets"]
