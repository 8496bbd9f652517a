"""Training of MuMo's head (`decodax.models.drafters.units`), beside a target that does not change (Hong, Lee and Cho,
2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.models.drafters.units import UnitHead
from decodax.train.drafting.features import TargetStates, read_batch
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast

Tree = Any


@dataclass(frozen=True)
class NextUnit:
    """The cross-entropy of the longest unit with which the text goes on, at every position where there is one.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the head.
        units: the tokens of each unit, padded with -1.
        dtype: dtype of the computation.
    """

    target: Any
    head: UnitHead
    units: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each unit, padded with -1: the vocabulary of the head."""
        return self.units

    @property
    def steps(self) -> int:
        """Number of drafts of the longest unit: its tokens after the first one."""
        return self.head.heads

    def __call__(self, params: Tree, batch: Array | TargetStates, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss, a mean over positions with a unit, and scalars to log: "loss", and for each draft the share
        that are the text's, if those before are, "accepted_1" and so on.

        A draft is a token of the head's best unit that begins with the text's next token.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`, or the target's states of it.
            extra: the target's weights.
        """
        units = jnp.asarray(self.units, jnp.int32)
        tokens, _, features = read_batch(self.target, self.head, extra, batch, self.dtype)
        logits = self.head.logits(cast(params, self.dtype), features.astype(self.dtype), 0, lambda hidden: hidden)
        labels = units_at(units, tokens[:, 1:])
        known = labels >= 0
        many = jnp.maximum(known.sum(), 1)
        loss = jnp.where(known, cross_entropy(logits, jnp.maximum(labels, 0)), 0).sum() / many
        begins = units[:, 0] == tokens[:, 1:, None]
        best = units[jnp.where(begins, logits, -jnp.inf).argmax(-1)]                    # [B, T, L]
        scalars, before = {}, known & begins.any(-1)
        for j in range(1, self.head.heads + 1):
            text = jnp.pad(tokens[:, 1 + j:], ((0, 0), (0, j)), constant_values=-2)
            drafted = before & (best[:, :, j] >= 0)
            before = drafted & (best[:, :, j] == text)
            scalars[f"accepted_{j}"] = before.sum() / jnp.maximum(drafted.sum(), 1)
        return loss, {"loss": loss, **scalars}


def units_at(units: Array, tokens: Array) -> Array:
    """Returns the longest unit that begins at each token of texts, `i32[B, T]`, -1 where there is none.

    >>> units_at(jnp.array([[5, 6, -1], [5, 6, 7]]), jnp.array([[5, 6, 7, 5, 6, 8]])).tolist()
    [[1, -1, -1, 0, -1, -1]]

    Args:
        units: `i32[U, L]`, padded with -1.
        tokens: `i32[B, T]`.
    """
    size = (units >= 0).sum(1)
    same = jnp.ones((*tokens.shape, units.shape[0]), bool)
    for j in range(units.shape[1]):
        text = jnp.pad(tokens[:, j:], ((0, 0), (0, j)), constant_values=-2)
        same &= (units[:, j] < 0) | (text[..., None] == units[:, j])
    return jnp.where(same.any(-1), jnp.where(same, size, 0).argmax(-1), -1)


__all__ = ["NextUnit", "units_at"]
