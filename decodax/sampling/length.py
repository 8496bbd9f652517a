"""Rules about the two ends of a text: forced first and last tokens, minimum lengths, a growing pull towards the end."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import forbid, members

UNBOUNDED = 1 << 30
"""A length that no text reaches; two of them still add up in an int32."""


def _force(logits: Array, tokens: Array, here: Array) -> Array:
    """Where `here`: 0 for `tokens` (`bool[V]`) and -inf for the rest. A NaN stays."""
    forced = jnp.where(jnp.isnan(logits), logits, jnp.where(tokens, 0, -jnp.inf))
    return jnp.where(here, forced, logits)


@struct
class ForcedBOS(Transform):
    """Forces `token` (`i32[B]`, -1: none) as the second of a text, that is, after a prompt of one token."""

    token: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        here = (ctx.length == 1) & (self.token >= 0)
        return _force(logits, members(self.token[None], logits.shape[-1]), here)


@struct
class ForcedEOS(Transform):
    """Forces one of `ids` (`i32[B, E]`, padded with -1) as the last token that a length limit leaves room for.

    Attributes:
        max_length: `i32[B]`, with the prompt. max_new: `i32[B]`, without it. `UNBOUNDED` where there is none; the
            smaller limit counts.
    """

    ids: Array
    max_length: Array
    max_new: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        last = jnp.minimum(self.max_length, ctx.prompt_length + self.max_new) - 1
        return _force(logits, members(self.ids, logits.shape[-1]), (ctx.length == last) & (self.ids >= 0).any())


@struct
class MinLength(Transform):
    """Forbids the tokens `eos` (`i32[B, E]`, padded with -1) while the text is too short.

    Attributes:
        min_length: `i32[B]`, with the prompt. min_new: `i32[B]`, without it.
    """

    eos: Array
    min_length: Array
    min_new: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        short = (ctx.length < self.min_length) | (ctx.length - ctx.prompt_length < self.min_new)
        return forbid(logits, members(self.eos, logits.shape[-1]) & short)


@struct
class ExponentialDecayLength(Transform):
    """Raises the logits of `eos` by their size times `factor ** n - 1`, `n` tokens beyond `start` new ones.

    It goes by the size of raw logits, as transformers does: a constant added to all of them changes it.

    Attributes:
        eos: `i32[B, E]`, padded with -1. start: `i32[B]` new tokens. factor: `f32[B]`; 1 changes nothing.
    """

    eos: Array
    start: Array
    factor: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        beyond = ctx.length - ctx.prompt_length - self.start
        # the growth has no bound of its own; an infinite logit would read as a broken one
        growth = jnp.minimum(self.factor ** jnp.maximum(beyond, 0).astype(jnp.float32) - 1, 1e30)
        raised = jnp.where(jnp.isfinite(logits), jnp.minimum(logits + jnp.abs(logits) * growth, 1e30), logits)
        return jnp.where(members(self.eos, logits.shape[-1]) & (beyond > 0), raised, logits)
