"""Transforms against texts that repeat themselves endlessly or never end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import static, struct
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import members, probabilities


@struct
class FSD(Transform):
    """Frustratingly simple decoding (Yang et al., 2024): penalises tokens that an n-gram model of the text so far
    predicts.

    The new logit of each of the `k` most likely tokens is `(1 - alpha) p - alpha g`; other tokens are removed. `p` is
    the model's probability and `g` that of the n-gram model, which combines all n-gram lengths up to `n`. It is meant
    for greedy decoding, which takes the largest value.

    Attributes:
        alpha: `f32[B]` in [0, 1]; 0 changes nothing.
        beta: `f32[B]`, smoothing: starting with the longest n-gram, each length gets this share of the weight that is
            left.
        stop_weight: `f32[B]`, factor of `g` for the tokens in `stop_words`.
        stop_words: `i32[B, W]`, ids of frequent tokens that are penalised less, padded with -1.
        k: static, the number of candidate tokens.
        n: static, the length of the longest n-gram.
    """

    alpha: Array
    beta: Array
    stop_weight: Array
    stop_words: Array
    k: int = static(default=3)
    n: int = static(default=3)

    needs = "sequence"

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        p = probabilities(logits)[1]
        best, ids = top_k(p, min(self.k, p.shape[-1]))
        light = members(self.stop_words, logits.shape[-1])[ids]
        penalty = self.anti(ctx, ids) * jnp.where(light, self.stop_weight, 1)
        score = jnp.where(best > 0, (1 - self.alpha) * best - self.alpha * penalty, -jnp.inf)
        chosen = jnp.full_like(logits, -jnp.inf).at[ids].set(score)
        return jnp.where((self.alpha == 0) | jnp.isnan(logits).any(), logits, chosen)

    def anti(self, ctx: Context, ids: Array) -> Array:
        """Returns the probabilities, `f32[k]`, that the smoothed n-gram model of the text in `ctx` gives to `ids`
        (`i32[k]`) as the next token; FSD subtracts them as a penalty for repetition."""
        place = jnp.arange(ctx.tokens.shape[0])
        here = place < ctx.length
        hits = here & (ctx.tokens == ids[:, None])                      # [k, N], occurrences of each token
        seen: list[Array] = []      # seen[i]: positions that follow an occurrence of the last i tokens
        for i in range(self.n):
            last = ctx.tokens[jnp.maximum(ctx.length - i, 0)] if i else None
            same = here if i == 0 else seen[-1] & (jnp.roll(ctx.tokens, i) == last) & (place >= i)
            seen.append(same)
        score, left = jnp.zeros(ids.shape), jnp.ones(ids.shape)
        for i in reversed(range(self.n)):
            count, total = (hits & seen[i]).sum(-1), seen[i].sum()
            share = self.beta if i else 1
            known = (count > 0) & (ctx.length >= i)
            score += jnp.where(known, left * share * count / jnp.maximum(total + (1 if i else 0), 1), 0)
            left = jnp.where(known, left * (1 - self.beta), left)
        return jnp.where(ctx.length < self.n - 1, 0, score)


@struct
class NonMonotonicEnd(Transform):
    """NMST (Choi et al., 2023): keeps the probability of an end token at least at `1 - (1 - epsilon) ** t` for the
    `t`-th new token.

    The probability may fall from one token to the next, but it tends to 1, so every text ends. If `s` is the model's
    probability of the end, the new one is `(1 - s) (1 - (1 - epsilon) ** t) + s`. The other tokens keep their
    proportions.

    The paper trains a head whose `s` is the sigmoid of a number apart from the softmax of the other tokens
    (`decodax.algorithms.contrastive.nmst` is a model with such a head). The logits of a model are only defined up to a
    constant, so here `s` is the sigmoid of the end's log-odds: its logit minus the log-sum-exp of the others. With the
    trained head this is the paper's `s`. For all other models it is the softmax probability of the end.

    Attributes:
        ends: `i32[B, E]`, tokens that end a text, padded with -1.
        epsilon: `f32[B]` in [0, 1); 0 changes nothing.
    """

    ends: Array
    epsilon: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        time = (ctx.length - ctx.prompt_length + 1).astype(jnp.float32)
        new = self_terminating(logits, members(self.ends, logits.shape[-1]), time, self.epsilon)
        return jnp.where((self.epsilon == 0) | jnp.isnan(logits).any(), logits, new)


def self_terminating(logits: Array, ends: Array, time: Array, epsilon: Array | float) -> Array:
    """Returns log-probabilities by the rule of `NonMonotonicEnd`, `f32[..., V]`; the logits themselves where they allow
    no end or nothing else.

    Args:
        logits: `f32[..., V]`.
        ends: `bool[V]`, tokens that end a text.
        time: `f32[...]`, number of the new token, from 1.
        epsilon: growth of the bound, in [0, 1).
    """
    sums = lambda keep: _log_sum(jnp.where(keep, logits, -jnp.inf))
    end, rest = sums(ends), sums(~ends)
    late = time[..., None] * jnp.log1p(-epsilon)          # log(1 - bound)
    s = jax.nn.sigmoid(end - rest)
    p = (1 - s) * -jnp.expm1(late) + s
    new = jnp.where(ends, logits - end + jnp.log(p), logits - rest + jax.nn.log_sigmoid(rest - end) + late)
    return jnp.where((end == -jnp.inf) | (rest == -jnp.inf), logits, new)


def _log_sum(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    some = jnp.log(jnp.exp(x - jnp.where(top == -jnp.inf, 0, top)).sum(-1, keepdims=True))
    return jnp.where(top == -jnp.inf, -jnp.inf, top + some)
