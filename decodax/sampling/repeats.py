"""Penalties on repeated passages: DRY and forbidden n-grams. Both measure the length of the repeat at the end of the
text."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import struct
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.penalties import recent
from decodax.sampling.threshold import forbid, members

Carry = tuple[Array, Array, Array, Array]


def repeated(tokens: Array, length: Array, most: Array) -> Array:
    """Returns for each index the number of tokens before it that equal the end of the text: `i32[N]`, at most `most`.

    Entry `i` is the length of the longest common suffix of `tokens[:i]` and `tokens[:length]`; it is 0 from `length`
    on. The cost is one pass over the text for each token of the longest repeat.

    Args:
        tokens: `i32[N]`, negative where unknown.
        length: `i32[]`, number of tokens of the text.
        most: `i32[]`, upper limit of the result.

    >>> repeated(jnp.array([1, 2, 3, 9, 1, 2, 3]), jnp.int32(7), jnp.int32(5)).tolist()
    [0, 0, 0, 3, 0, 0, 0]
    """
    # Unknown and later tokens agree with nothing.
    text = jnp.where((jnp.arange(tokens.shape[0]) < length) & (tokens >= 0), tokens, -1)
    before = lambda x: jnp.concatenate([jnp.full(1, -1, jnp.int32), x[:-1]])

    def unfinished(carry: Carry) -> Array:
        step, _, alive, _ = carry
        return (step < most) & alive.any()

    def compare(carry: Carry) -> Carry:
        step, shifted, alive, count = carry        # shifted[i] is the token `step + 1` before index i
        last = text[jnp.maximum(length - 1 - step, 0)]
        alive = alive & (shifted == last) & (shifted >= 0)
        return step + 1, before(shifted), alive, count + alive

    index = jnp.arange(tokens.shape[0])
    start = (jnp.zeros((), jnp.int32), before(text), index < length, jnp.zeros(tokens.shape[0], jnp.int32))
    return lax.while_loop(unfinished, compare, start)[3]


@struct
class NoRepeatNgram(Transform):
    """Forbids a token that would repeat an n-gram of the text, prompt included (fairseq; Paulus et al., 2018).

    `size` is `i32[B]`, the length of the n-gram; 0 forbids nothing, 1 forbids every token that has occurred.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    size: Array

    def banned(self, ctx: Context) -> Array:
        """Returns the positions in the text of `ctx` whose token may not come next, since with it the last tokens would
        repeat an n-gram that ends there: `bool[N]`."""
        n = jnp.maximum(self.size - 1, 0)
        inside = jnp.arange(ctx.tokens.shape[0]) < ctx.length
        return (repeated(ctx.tokens, ctx.length, n) >= n) & inside & (self.size > 0)

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return forbid(logits, members(jnp.where(self.banned(ctx), ctx.tokens, -1), logits.shape[-1]))


@struct
class EncoderNoRepeatNgram(NoRepeatNgram):
    """Forbids a token that would repeat an n-gram of the prompt. `size` is the length of the n-gram, as in
    `NoRepeatNgram`."""

    def banned(self, ctx: Context) -> Array:
        return super().banned(ctx) & (jnp.arange(ctx.tokens.shape[0]) < ctx.prompt_length)


@struct
class Dry(Transform):
    """DRY ("don't repeat yourself"; p-e-w, 2024), with the rules of llama.cpp: a penalty that grows with the length of
    the repeat.

    If the last `n >= allowed` tokens repeat an earlier passage, `multiplier * base ** (n - allowed)` is subtracted from
    the logit of the token that followed it. A repeat ends at the last sequence breaker; a token that is a breaker by
    itself is not penalised.

    Attributes:
        multiplier: `f32[B]`, factor of the penalty; 0 changes nothing.
        base: `f32[B]`, base of the exponential growth, at least 1.
        allowed: `i32[B]`, longest repeat without a penalty.
        last_n: `i32[B]`, number of tokens at the end that are searched; negative: all, 0: none.
        breakers: `i32[B, S, L]`, token sequences padded with -1 at the end.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    multiplier: Array
    base: Array
    allowed: Array
    last_n: Array
    breakers: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        size = logits.shape[-1]
        index = jnp.arange(ctx.tokens.shape[0])
        inside = recent(ctx, self.last_n) & (index < ctx.length)
        text = jnp.where(inside, ctx.tokens, -1)
        # Beyond this exponent base ** n overflows, so longer repeats are treated alike.
        log_base = jnp.log(self.base)
        top = jnp.where(self.base > 1.000001, jnp.floor(88.7228391 / jnp.maximum(log_base, 1e-6)), index.shape[0])
        limit = self._limit(text, ctx.length)
        found = repeated(text, ctx.length, jnp.minimum(limit, self.allowed + top.astype(jnp.int32)))
        ends = inside & (found >= self.allowed)
        ends = ends & (index > ctx.length - inside.sum())      # some of the searched text must come before it
        longest = jnp.full(size, -1, jnp.int32).at[jnp.where(ends, text, size)].max(found, mode="drop")
        alone = jnp.where((self.breakers >= 0).sum(-1) == 1, self.breakers[:, 0], -1)
        on = (self.multiplier != 0) & (self.base >= 1) & (inside.sum() > self.allowed) & (limit >= self.allowed)
        hit = on & (longest >= 0) & ~members(alone, size)
        exponent = (longest - self.allowed).astype(jnp.float32)
        return logits - jnp.where(hit, self.multiplier * self.base ** jnp.where(hit, exponent, 0), 0)

    def _limit(self, text: Array, length: Array) -> Array:
        """Returns the largest length of a repeat, in tokens, that does not reach back into a match of a breaker:
        `i32[]`."""
        count = self.breakers.shape[1]
        known = self.breakers >= 0
        ahead = jnp.stack([jnp.concatenate([text[i:], jnp.full(i, -1, jnp.int32)]) for i in range(count)], -1)  # [N, L]
        match = ((ahead[None] == self.breakers[:, None]) | ~known[:, None]).all(-1) & known[:, :1]              # [S, N]
        tail = jnp.where(match, known.sum(-1, keepdims=True) - 1, -1).max(0)                                    # [N]
        head = jnp.where(tail >= 0, jnp.arange(text.shape[0]), -1).max()
        after = length - 1 - head - tail[jnp.maximum(head, 0)]
        return jnp.where(head >= 0, after, length)
