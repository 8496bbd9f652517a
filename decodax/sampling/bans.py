"""Bans and biases on tokens and token sequences, at every position or only at the beginning.

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
    """Returns `bool[S]`: True for each sequence whose last token would complete it, because the text ends with the
    tokens before.

    Args:
        ctx: the text of one row.
        sequences: `i32[S, L]`, padded with -1 at the front.
    """
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
    """Adds a bias to the logit of a token that would complete a sequence. Biases of several sequences are added up.

    Attributes:
        sequences: `i32[B, S, L]`, padded with -1 at the front.
        values: `f32[B, S]`, the biases.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    sequences: Array
    values: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        target = jnp.where(completes(ctx, self.sequences), self.sequences[:, -1], logits.shape[-1])
        return logits.at[target].add(self.values, mode="drop")


@struct
class BadWords(Transform):
    """Forbids tokens that would complete one of the given sequences.

    Attributes:
        sequences: `i32[B, S, L]`, padded with -1 at the front.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    sequences: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        last = jnp.where(completes(ctx, self.sequences), self.sequences[:, -1], -1)
        return forbid(logits, members(last, logits.shape[-1]))


@struct
class SuppressTokens(Transform):
    """Forbids the tokens `ids` (`i32[B, E]`, padded with -1)."""

    ids: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return forbid(logits, members(self.ids, logits.shape[-1]))


@struct
class BeginSuppress(Transform):
    """Forbids tokens as the first new token.

    Attributes:
        ids: `i32[B, E]`, padded with -1.
        after_bos: `bool[B]`, True if a `ForcedBOS` is in the chain. After a prompt of one token, the tokens are then
            forbidden as the second new token instead.
    """

    ids: Array
    after_bos: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        first = ctx.prompt_length + (self.after_bos & (ctx.prompt_length == 1))
        return forbid(logits, members(self.ids, logits.shape[-1]) & (ctx.length == first))


@struct
class AllowedTokens(Transform):
    """Forbids all tokens except `ids` (`i32[B, E]`, padded with -1). A row without ids is not changed."""

    ids: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return forbid(logits, ~members(self.ids, logits.shape[-1]) & (self.ids >= 0).any())
