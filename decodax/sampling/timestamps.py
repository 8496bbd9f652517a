"""Rules for the timestamps of transcribed speech (Radford et al., 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import struct
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import forbid


@struct
class Timestamps(Transform):
    """Allows timestamps in pairs, in order, and around every text, as Whisper was trained.

    The tokens from `begin` on are timestamps. The one before them, which in a prompt asks for a text without
    timestamps, is forbidden. The text begins with a timestamp. After a text comes one that ends it, and then one that
    begins the next text, or the end of the sequence. No timestamp is smaller than an earlier one, and one that begins a
    text and one that ends it differ. Where all timestamps together are more likely than the likeliest other token, the
    next token is a timestamp.

    Attributes:
        begin: `i32[B]`, id of the first timestamp, at 0 seconds; those after it follow in steps of 0.02 seconds.
        end: `i32[B]`, id of the end token, above those of all text.
        latest: `i32[B]`, number of the latest timestamp with which the text may begin; -1: any.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    begin: Array
    end: Array
    latest: Array

    @classmethod
    def of(cls, rows: int, begin: int, end: int, latest: int | None = None) -> Timestamps:
        """Returns the transform for `rows` rows with equal settings: ids of the first timestamp and of the end token,
        and the number of the latest timestamp with which a text may begin; None: any."""
        each = lambda x: jnp.full(rows, x, jnp.int32)
        return cls(begin=each(begin), end=each(end), latest=each(-1 if latest is None else latest))

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        ids, made = jnp.arange(logits.shape[-1]), ctx.length - ctx.prompt_length
        times, at = ids >= self.begin, jnp.arange(ctx.tokens.shape[0])
        stamped = (at >= ctx.prompt_length) & (at < ctx.length) & (ctx.tokens >= self.begin)
        back = lambda n: stamped[jnp.maximum(ctx.length - n, 0)] & (made >= n)
        one, two = back(1), (made < 2) | back(2)
        newest = ctx.tokens[jnp.where(stamped, at, -1).max()]
        # one that begins a text may be as late as the one that ended the text before
        least = jnp.where(stamped.any(), jnp.where(one & ~two, newest, newest + 1), self.begin)
        barred = (one & two & times) | (one & ~two & (ids < self.end)) | (
            times & (ids < least)) | (ids == self.begin - 1)
        first = ~times | ((self.latest >= 0) & (ids > self.begin + self.latest))
        logits = forbid(logits, barred | ((made == 0) & first))
        all_times = jax.nn.logsumexp(jnp.where(times, logits, -jnp.inf))
        return forbid(logits, ~times & (all_times > jnp.where(times, -jnp.inf, logits).max()))
