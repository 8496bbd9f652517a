"""Transforms against texts that repeat themselves without end, or never end."""

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
    """Frustratingly simple decoding (Yang et al., 2024): the model against an n-gram model of the text so far.

    Of the `k` most likely tokens that with the largest `(1 - alpha) p - alpha g`, where `g` is what the n-gram model,
    smoothed from the longest n-gram down, says of it. Greedy by nature: behind it stands the largest value.

    Attributes:
        alpha: `f32[B]` in [0, 1]; 0 changes nothing. beta: `f32[B]`, the share that a longer n-gram takes of what is
            left. stop_weight: `f32[B]`, what `g` counts for at the tokens `stop_words`, `i32[B, W]`, -1 for none.
        k, n: static, tokens that are looked at, and the longest n-gram.
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
        """`f32[k]`: how likely the n-gram model finds tokens."""
        place = jnp.arange(ctx.tokens.shape[0])
        here = place < ctx.length
        hits = here & (ctx.tokens == ids[:, None])                      # [k, N], where each token stands
        seen: list[Array] = []      # what stands behind the last i tokens
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
    """NMST (Choi et al., 2023): the end's probability is at least `1 - (1 - epsilon) ** t` at the `t`-th token.

    It need not rise from token to token, and yet tends to 1, so that every text ends. With `s`, the model's own
    probability of the end, it is `(1 - s) (1 - (1 - epsilon) ** t) + s`; the others share the rest as they did.

    The paper trains a model whose `s` is the sigmoid of the end's logit, apart from the softmax of the others. Logits
    of other models mean nothing up to a constant, so `s` is the sigmoid of the end's log-odds here, the logit less the
    logarithm of the others' summed exponentials. That is the paper's `s` where the others are normalised, and the
    softmax of any other model, which the rule leaves as it is where `epsilon` is near 0.

    Attributes:
        ends: `i32[B, E]`, -1 for none. epsilon: `f32[B]` in (0, 1); 0 changes nothing.
    """

    ends: Array
    epsilon: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        ends = members(self.ends, logits.shape[-1])
        time = (ctx.length - ctx.prompt_length + 1).astype(jnp.float32)
        sums = lambda keep: _log_sum(jnp.where(keep, logits, -jnp.inf))
        end, rest = sums(ends), sums(~ends)
        late = time * jnp.log1p(-self.epsilon)          # log of 1 less the bound
        s = jax.nn.sigmoid(end - rest)
        p = (1 - s) * -jnp.expm1(late) + s
        new = jnp.where(ends, logits - end + jnp.log(p), logits - rest + jax.nn.log_sigmoid(rest - end) + late)
        left_alone = (self.epsilon == 0) | (end == -jnp.inf) | (rest == -jnp.inf) | jnp.isnan(logits).any()
        return jnp.where(left_alone, logits, new)


def _log_sum(x: Array) -> Array:
    top = x.max()
    return jnp.where(top == -jnp.inf, -jnp.inf, top + jnp.log(jnp.exp(x - jnp.where(top == -jnp.inf, 0, top)).sum()))
