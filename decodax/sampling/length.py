"""Rules for the beginning and the end of a text: forced first and last tokens, minimum lengths, a growing bias towards
the end token."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import forbid, members

UNBOUNDED = 1 << 30
"""A length that no text reaches; two of them still add up in an int32."""


def _force(logits: Array, tokens: Array, here: Array) -> Array:
    """Sets the logits of `tokens` (`bool[V]`) to 0 and all others to -inf if `here` is True. A NaN is not changed."""
    forced = jnp.where(jnp.isnan(logits), logits, jnp.where(tokens, 0, -jnp.inf))
    return jnp.where(here, forced, logits)


@struct
class ForcedBOS(Transform):
    """Forces the token `token` (`i32[B]`, -1 for none) as the second token of a text: the one after a prompt of one
    token."""

    token: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        here = (ctx.length == 1) & (self.token >= 0)
        return _force(logits, members(self.token[None], logits.shape[-1]), here)


@struct
class ForcedEOS(Transform):
    """Forces an end token as the last token within a length limit.

    Attributes:
        ids: `i32[B, E]`, the end tokens, one of which is forced, padded with -1.
        max_length: `i32[B]`, limit including the prompt; `UNBOUNDED` for none.
        max_new: `i32[B]`, limit without the prompt; `UNBOUNDED` for none. If both are set, the smaller limit counts.
    """

    ids: Array
    max_length: Array
    max_new: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        last = jnp.minimum(self.max_length, ctx.prompt_length + self.max_new) - 1
        return _force(logits, members(self.ids, logits.shape[-1]), (ctx.length == last) & (self.ids >= 0).any())


@struct
class MinLength(Transform):
    """Forbids end tokens while the text is shorter than a minimum length.

    Attributes:
        eos: `i32[B, E]`, the end tokens, padded with -1.
        min_length: `i32[B]`, minimum length including the prompt.
        min_new: `i32[B]`, minimum length without the prompt.
    """

    eos: Array
    min_length: Array
    min_new: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        short = (ctx.length < self.min_length) | (ctx.length - ctx.prompt_length < self.min_new)
        return forbid(logits, members(self.eos, logits.shape[-1]) & short)


@struct
class ExponentialDecayLength(Transform):
    """Adds `abs(logit) * (factor ** n - 1)` to the logits of end tokens, where `n` is the number of new tokens beyond
    `start`.

    As in transformers, the result depends on the level of the logits: adding a constant to all of them changes it.

    Attributes:
        eos: `i32[B, E]`, the end tokens, padded with -1.
        start: `i32[B]`, number of new tokens before the effect begins.
        factor: `f32[B]`; 1 changes nothing.
    """

    eos: Array
    start: Array
    factor: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        beyond = ctx.length - ctx.prompt_length - self.start
        # The growth is unbounded, and an infinite logit would count as invalid.
        growth = jnp.minimum(self.factor ** jnp.maximum(beyond, 0).astype(jnp.float32) - 1, 1e30)
        raised = jnp.where(jnp.isfinite(logits), jnp.minimum(logits + jnp.abs(logits) * growth, 1e30), logits)
        return jnp.where(members(self.eos, logits.shape[-1]) & (beyond > 0), raised, logits)
