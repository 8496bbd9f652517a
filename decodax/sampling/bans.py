"""Bans and biases: on tokens, on token sequences, everywhere or at the beginning.

Lists are padded with -1, so that lists of similar length share one compiled program.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import forbid, members


def completes(ctx: Context, sequences: Array) -> Array:
    """`bool[S]`: sequences (`i32[S, L]`, padded with -1 *in front*) whose all but last tokens end the text."""
    before = sequences.shape[1] - 1
    index = ctx.length - before + jnp.arange(before)
    tail = jnp.where(index >= 0, ctx.tokens[jnp.maximum(index, 0)], -1)
    prefix = sequences[:, :-1]
    return ((prefix == tail) | (prefix < 0)).all(-1) & (sequences[:, -1] >= 0)


@struct
class LogitBias(Transform):
    """Adds `values` (`f32[B, E]`) to the logits of `ids` (`i32[B, E]`, padded with -1).

    >>> LogitBias(jnp.array([1, -1]), jnp.array([0.5, 9.0])).logits(None, None, jnp.zeros(3)).tolist()
    [0.0, 0.5, 0.0]
    """

    ids: Array
    values: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return logits.at[jnp.where(self.ids >= 0, self.ids, logits.shape[-1])].add(self.values, mode="drop")


@struct
class SequenceBias(Transform):
    """Adds a bias to the last token of a sequence where the text ends in the tokens before it; biases add up.

    Attributes:
        sequences: `i32[B, S, L]`, padded with -1 in front. values: `f32[B, S]`.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    sequences: Array
    values: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        target = jnp.where(completes(ctx, self.sequences), self.sequences[:, -1], logits.shape[-1])
        return logits.at[target].add(self.values, mode="drop")


@struct
class BadWords(Transform):
    """Forbids the last token of each of `sequences` (`i32[B, S, L]`, padded with -1 in front) where the rest stands."""

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    sequences: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        last = jnp.where(completes(ctx, self.sequences), self.sequences[:, -1], -1)
        return forbid(logits, members(last, logits.shape[-1]))


@struct
class SuppressTokens(Transform):
    """Forbids `ids` (`i32[B, E]`, padded with -1)."""

    ids: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return forbid(logits, members(self.ids, logits.shape[-1]))


@struct
class BeginSuppress(Transform):
    """Forbids `ids` (`i32[B, E]`, padded with -1) for the first new token.

    Attributes:
        after_bos: `bool[B]`: a `ForcedBOS` is in the chain, so with a prompt of one token the second is meant.
    """

    ids: Array
    after_bos: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        first = ctx.prompt_length + (self.after_bos & (ctx.prompt_length == 1))
        return forbid(logits, members(self.ids, logits.shape[-1]) & (ctx.length == first))


@struct
class AllowedTokens(Transform):
    """Forbids everything but `ids` (`i32[B, E]`, padded with -1); a row without any id is left alone."""

    ids: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return forbid(logits, ~members(self.ids, logits.shape[-1]) & (self.ids >= 0).any())
