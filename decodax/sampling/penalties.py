"""Penalties on tokens that have already occurred, in any order."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import members


def recent(ctx: Context, last_n: Array) -> Array:
    """Returns the positions of known tokens among the last `last_n` (`i32[]`) before the one to be chosen, `bool[N]`;
    all known tokens if `last_n` is negative.

    On a diffusion canvas, known tokens after the one to be chosen count as well.
    """
    index = jnp.arange(ctx.tokens.shape[0])
    return (ctx.tokens >= 0) & ((last_n < 0) | ((index >= ctx.length - last_n) & (last_n > 0)))


def _scale(logits: Array, factor: Array) -> Array:
    """Multiplies negative logits by `factor` and divides the others by it. A factor above 1 lowers all of them."""
    return jnp.where(logits < 0, logits * factor, logits / factor)


@struct
class Repetition(Transform):
    """Divides positive logits of earlier tokens by `penalty` and multiplies negative ones by it (CTRL; Keskar et al.,
    2019).

    As in the paper and other engines, the result depends on the sign of the logits: adding a constant to all of them
    changes it.

    Attributes:
        penalty: `f32[B]`; 1 changes nothing.
        ignore: `i32[B]`, number of tokens at the beginning of the text that do not count.
        last_n: `i32[B]`, number of tokens at the end that count (llama.cpp); negative: all (transformers).
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "bag"

    penalty: Array
    ignore: Array
    last_n: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        counts = recent(ctx, self.last_n) & (jnp.arange(ctx.tokens.shape[0]) >= self.ignore)
        seen = members(jnp.where(counts, ctx.tokens, -1), logits.shape[-1])
        return jnp.where(seen, _scale(logits, self.penalty), logits)


@struct
class EncoderRepetition(Transform):
    """The inverse of `Repetition` for the tokens of the prompt: a `penalty` (`f32[B]`) above 1 favours them.

    Like that of `Repetition`, the result depends on the sign of the logits.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "bag"

    penalty: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        prompt = jnp.where(jnp.arange(ctx.tokens.shape[0]) < ctx.prompt_length, ctx.tokens, -1)
        return jnp.where(members(prompt, logits.shape[-1]), _scale(logits, 1 / self.penalty), logits)


@struct
class PresenceFrequency(Transform):
    """Subtracts `presence` once, and `frequency` for each occurrence, from the logits of tokens that have occurred.

    OpenAI and vLLM count occurrences in the generated text only (`prompt` False, `last_n` -1). llama.cpp counts those
    in the last 64 tokens, prompt included.

    Attributes:
        presence: `f32[B]`; 0 changes nothing.
        frequency: `f32[B]`; 0 changes nothing.
        last_n: `i32[B]`, number of tokens at the end that count; negative: all.
        prompt: `bool[B]`, True if tokens of the prompt count.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "bag"

    presence: Array
    frequency: Array
    last_n: Array
    prompt: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        size = logits.shape[-1]
        counts = recent(ctx, self.last_n) & (self.prompt | (jnp.arange(ctx.tokens.shape[0]) >= ctx.prompt_length))
        count = jnp.zeros(size, jnp.float32).at[jnp.where(counts, ctx.tokens, size)].add(1, mode="drop")
        return logits - count * self.frequency - jnp.where(count > 0, self.presence, 0)
