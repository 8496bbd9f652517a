"""Truncations: transforms that remove the less likely tokens of a distribution.

Rules and edge cases are those of the processors of the same names in Hugging Face transformers. If a rule keeps the
smallest set with some property, tokens as likely as the last kept one are kept, too, so the set never depends on the
order of ids. Logits with a NaN are not changed, and neither is a row in which all are -inf.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import static, struct
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import kth_largest, largest_threshold, less, once, probabilities


def _keep_best(logits: Array, removed: Array, count: int) -> Array:
    """Sets the logits of `removed` (`bool[V]`) to -inf, except for the `count` largest ones."""
    best = logits.max() if count == 1 else top_k(logits, min(count, logits.shape[-1]))[0][-1]
    return jnp.where(removed & (logits < best), -jnp.inf, logits)


@struct
class TopK(Transform):
    """Keeps the `k` most likely tokens (Fan et al., 2018), and those as likely as the last of them.

    Attributes:
        k: `i32[B]`; 0 keeps all.
        limit: static; an upper bound on `k`, or None. With a bound of at most about 128, `lax.top_k` finds the
            threshold twice as fast on CPU.
        min_keep: static; a lower bound on `k`.

    >>> TopK(jnp.int32(2)).logits(None, None, jnp.array([1.0, 4.0, 2.0])).tolist()
    [-inf, 4.0, 2.0]
    """

    k: Array
    limit: int | None = static(default=None)
    min_keep: int = static(default=1)

    def truncation(self) -> tuple[str, Array] | None:
        return ("k", self.k) if self.min_keep == 1 else None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        k, logits = jnp.where(self.k > 0, jnp.maximum(self.k, self.min_keep), logits.shape[-1]), once(logits)
        if self.limit is None:
            least = kth_largest(logits, k)
        else:
            best = top_k(logits, min(max(self.limit, self.min_keep), logits.shape[-1]))[0]
            least = jnp.where(self.k > 0, best[jnp.minimum(k, best.shape[0]) - 1], -jnp.inf)
        return jnp.where(less(logits, least), -jnp.inf, logits)


@struct
class TopP(Transform):
    """Nucleus sampling: keeps the smallest set of most likely tokens whose total probability reaches `p` (Holtzman et
    al., 2020).

    Attributes:
        p: `f32[B]` in [0, 1]; 1 keeps all, 0 the most likely token.
        min_keep: static; the smallest number of tokens kept.

    >>> TopP(jnp.float32(0.7)).logits(None, None, jnp.log(jnp.array([0.25, 0.5, 0.125, 0.125]))).round(2).tolist()
    [-1.3899999856948853, -0.6899999976158142, -inf, -inf]
    """

    p: Array
    min_keep: int = static(default=1)

    def truncation(self) -> tuple[str, Array] | None:
        return ("p", self.p) if self.min_keep == 1 else None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        logits = once(logits)
        weights = jnp.exp(logits - logits.max())
        cut = largest_threshold(logits, weights, self.p)
        return _keep_best(logits, less(logits, cut) & (self.p < 1), self.min_keep)


@struct
class MinP(Transform):
    """Keeps tokens at least `p` times as likely as the most likely one (Nguyen et al., 2024).

    Attributes:
        p: `f32[B]` in [0, 1]; 0 keeps all.
        min_keep: static; the smallest number of tokens kept.
    """

    p: Array
    min_keep: int = static(default=1)

    def truncation(self) -> tuple[str, Array] | None:
        return ("min_p", self.p) if self.min_keep == 1 else None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return _keep_best(logits, jnp.exp(logits - logits.max()) < self.p, self.min_keep)


@struct
class Typical(Transform):
    """Keeps the tokens whose surprisal is nearest to the entropy, until their total probability reaches `p` (Meister et
    al., 2022).

    The most likely token may be removed.

    Attributes:
        p: `f32[B]` in (0, 1]; 1 keeps all.
        min_keep: static; the smallest number of tokens kept.
    """

    p: Array
    min_keep: int = static(default=1)

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        log_p, p, entropy = probabilities(logits)
        near = once(-jnp.abs(-log_p - entropy))
        cut = largest_threshold(near, p, self.p)
        if self.min_keep > 1:
            cut = jnp.minimum(cut, top_k(near, min(self.min_keep, near.shape[0]))[0][-1])
        return jnp.where(less(near, cut) & (self.p < 1), -jnp.inf, logits)


@struct
class Epsilon(Transform):
    """Keeps tokens of probability `epsilon` or more (Hewitt et al., 2022).

    Attributes:
        epsilon: `f32[B]` in [0, 1); 0 keeps all.
        min_keep: static; the smallest number of tokens kept.
    """

    epsilon: Array
    min_keep: int = static(default=1)

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return _keep_best(logits, probabilities(logits)[1] < self.epsilon, self.min_keep)


@struct
class Eta(Transform):
    """Keeps tokens of probability `min(epsilon, sqrt(epsilon) * exp(-entropy))` or more (Hewitt et al., 2022).

    Attributes:
        epsilon: `f32[B]` in [0, 1); 0 keeps all.
        min_keep: static; the smallest number of tokens kept.
    """

    epsilon: Array
    min_keep: int = static(default=1)

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        _, p, entropy = probabilities(logits)
        eta = jnp.minimum(self.epsilon, jnp.sqrt(self.epsilon) * jnp.exp(-entropy))
        return _keep_best(logits, p < eta, self.min_keep)


@struct
class TopH(Transform):
    """Top-H (Potraghloo et al., 2025): keeps the most likely tokens as long as their part of the entropy, the sum of
    `-p log p`, is at most `h` times the total.

    The entropy is that of the `limit` most likely tokens, normalised, and no other token is ever kept, as in
    transformers.

    Attributes:
        h: `f32[B]` in (0, 1]; a row with `h` above 1 is not changed.
        limit: static, the number of candidate tokens.
    """

    h: Array
    limit: int = static(default=100)

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        best, ids = top_k(logits, min(self.limit, logits.shape[-1]))
        log_p, p, entropy = probabilities(best)
        spent = jnp.cumsum(jnp.where(p == 0, 0, -p * log_p))
        keep = ((spent <= entropy * self.h) & (p > 0)).at[0].set(True)
        kept = jnp.full_like(logits, -jnp.inf).at[ids].set(jnp.where(keep, best, -jnp.inf))
        return jnp.where((self.h > 1) | jnp.isnan(logits).any(), logits, kept)
