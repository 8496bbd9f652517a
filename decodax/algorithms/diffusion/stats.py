"""Statistics of a distribution over the vocabulary, computed in one pass.

The logits are read once, in chunks that fit in the processor's cache. Each chunk is added to running sums: the online
softmax of Milakov and Gimelshein (2018), with the two largest logits and the entropy. Only a few numbers are stored for
each position, and no array is as wide as the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, struct

CHUNK = 4096
"""Number of vocabulary entries in a chunk."""


@struct
class DistributionStats(Struct):
    """Statistics of distributions with any leading axes `...`, all `f32[...]`, in natural logarithms.

    Attributes:
        log_prob: log-probability of a given token. The relative error is 1e-7 even if the probability is close to 1.
        entropy: entropy in nats.
        lse: logarithm of the sum of exponentials of the logits.
        top, second: the two largest logits.
    """

    log_prob: Array
    entropy: Array
    lse: Array
    top: Array
    second: Array

    @property
    def prob(self) -> Array:
        """Probability of the candidate token (the one that was given to `statistics`), `f32[...]`."""
        return jnp.exp(self.log_prob)

    @property
    def margin(self) -> Array:
        """Largest probability of a token minus the second largest, `f32[...]`."""
        return jnp.exp(self.top - self.lse) - jnp.exp(self.second - self.lse)

    @property
    def gap(self) -> Array:
        """Largest logit minus the second largest, `f32[...]`."""
        return self.top - self.second


def statistics(logits: Array, tokens: Array, chunk: int = CHUNK) -> DistributionStats:
    """Returns the statistics of the distributions with logits `f32[..., V]`. `tokens` (`i32[...]`) are the given
    tokens; negative ones count as token 0.

    >>> s = statistics(jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([0]))
    >>> [round(float(x[0]), 4) for x in (s.prob, s.entropy, s.margin, s.gap)]
    [0.5, 1.0397, 0.25, 0.6931]
    """
    V, tokens = logits.shape[-1], jnp.maximum(tokens, 0)

    def fold(carry: tuple[Array, ...], x: Array, first: Array | int) -> tuple[Array, ...]:
        top, second, total, rest, weighted = carry
        index = first + jnp.arange(x.shape[-1], dtype=jnp.int32)
        best = x.max(-1)
        at = jnp.argmax(x, -1)
        runner = jnp.where(jnp.arange(x.shape[-1]) == at[..., None], -jnp.inf, x).max(-1)
        new = jnp.maximum(top, best)
        # all sums are relative to the running maximum; one of -inf has seen nothing yet
        base = jnp.where(new == -jnp.inf, 0, new)
        shrink = jnp.where(top == -jnp.inf, 0, jnp.exp(top - base))
        shift = jnp.where(top == -jnp.inf, 0, top - base)
        y = x - base[..., None]
        e = jnp.exp(y)
        ey = jnp.where(e > 0, e * y, 0)
        return (new, jnp.maximum(jnp.minimum(top, best), jnp.maximum(second, runner)),
                total * shrink + e.sum(-1),
                rest * shrink + jnp.where(index == tokens[..., None], 0, e).sum(-1),
                shrink * (weighted + shift * total) + ey.sum(-1))

    low, zero = (jnp.full(tokens.shape, v, jnp.float32) for v in (-jnp.inf, 0))
    carry: tuple[Array, ...] = (low, low, zero, zero, zero)
    whole = V // chunk if V > chunk else 0
    if whole:
        carry = lax.fori_loop(0, whole, lambda i, c: fold(
            c, lax.dynamic_slice_in_dim(logits, i * chunk, chunk, -1), i * chunk), carry)
    if whole * chunk < V:
        carry = fold(carry, logits[..., whole * chunk:], whole * chunk)
    top, second, total, rest, weighted = carry
    log_total = jnp.log(total)
    y = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0] - top
    # near 1 the others' sum tells probabilities apart that a difference of logarithms rounds to the same number
    likely = jnp.exp(y) * 2 > total
    return DistributionStats(
        log_prob=jnp.where(likely, -jnp.log1p(rest / jnp.where(likely, jnp.exp(y), 1)), y - log_total),
        entropy=jnp.maximum(log_total - weighted / total, 0), lse=top + log_total, top=top, second=second)


def cosine(a: Array, b: Array, axis: int = -1) -> Array:
    """Returns the cosine similarity along an axis, `f32[...]`. Lengths below 1e-8 are replaced by 1e-8, as in torch. A
    bound on the product of both lengths instead would make short vectors dissimilar to themselves.

    >>> x = jnp.array([1e-6, 2e-6])
    >>> round(float(cosine(x, x)), 4)
    1.0
    """
    unit = lambda x: x / jnp.maximum(jnp.sqrt(jnp.square(x).sum(axis, keepdims=True)), 1e-8)
    return (unit(a) * unit(b)).sum(axis)


def rank(score: Array, among: Array) -> Array:
    """Returns the rank of each position by falling score, `i32[R, W]`: 0, 1, ... for the positions in `among`, with
    equal ones from left to right. All other positions come after these.

    >>> rank(jnp.array([[1.0, 3.0, 3.0, 2.0]]), jnp.array([[True, False, True, True]])).tolist()
    [[2, 3, 0, 1]]
    """
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), axis=-1, stable=True)
    place = jax.lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    return jnp.put_along_axis(jnp.zeros_like(place), order, place, -1, inplace=False)
