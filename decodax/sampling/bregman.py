"""Bregman top-k: how many tokens stay, and with which probabilities, by one objective."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import static, struct
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import probabilities

STEPS = 32
"""Halvings of an interval."""


@struct
class BregmanTopK(Transform):
    """The sparse distribution `q` nearest to `p`: the least of `D(q, p) + cost * tokens of q` (Noarov et al., 2025).

    `D` is the separable Bregman divergence of `x ** alpha / (alpha (alpha - 1))`. The best `q` lies on the `k` most
    likely tokens, and its cost falls and then rises with `k`; both `k` and `q` come out of the distribution at hand.
    At `alpha` 1 the divergence is that of Kullback and Leibler, and `q` is top-k sampling with a `k` of its own.

    Attributes:
        cost: `f32[B]` of a token that stays; 0 keeps all.
        alpha: `f32[B]`, 1 or larger.
        dual: static; the least of `D(p, q)` instead.
        limit: static; the most tokens that may stay. Beyond it the objective is not looked at.
    """

    cost: Array
    alpha: Array
    dual: bool = static(default=False)
    limit: int = static(default=256)

    stage = "probabilities"

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        p = probabilities(logits)[1]
        best, ids = top_k(p, min(self.limit, p.shape[-1]))
        count = (best > 0).sum()
        # what each token costs that does not stay, added up
        power = jnp.where(p > 0, p, 0) ** self.alpha
        lost = power / (self.alpha * jnp.maximum(self.alpha - 1, EPSILON)) if self.dual else power / self.alpha
        head = jnp.cumsum(lost[ids])

        def total(k: Array) -> Array:
            inside = jnp.arange(best.shape[0]) < k
            q = self.nearest(best, inside)
            paid = jnp.where(inside, self.divergence(best, q) if self.dual else self.divergence(q, best), 0).sum()
            return paid + (lost.sum() - head[k - 1]) + self.cost * k

        def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = span                # the least lies within [low, high]
            middle = (low + high) // 2
            rises = total(middle + 1) >= total(middle)
            return jnp.where(rises, low, middle + 1), jnp.where(rises, middle, high)

        steps = max(best.shape[0] - 1, 1).bit_length()
        k = lax.fori_loop(0, steps, halve, (jnp.int32(1), count.astype(jnp.int32)))[0]
        q = self.nearest(best, jnp.arange(best.shape[0]) < k)
        kept = jnp.full_like(logits, -jnp.inf).at[ids].set(jnp.log(q))
        return jnp.where((self.cost == 0) | jnp.isnan(logits).any() | (count == 0), logits, kept)

    def nearest(self, p: Array, inside: Array) -> Array:
        """The best `q` on some tokens: `f32[n]`, 0 elsewhere."""
        def at(nu: Array) -> Array:
            return jnp.where(inside, self._dual(p, nu) if self.dual else self._primal(p, nu), 0)

        # the multiplier is 0 where all stay, and no larger than where one token alone would be certain
        nu = _root(lambda nu: at(nu).sum() - 1, jnp.float32(0), jnp.float32(1))
        q = jnp.where(self.alpha - 1 < EPSILON, jnp.where(inside, p, 0), at(nu))
        return q / q.sum()

    def _primal(self, p: Array, nu: Array) -> Array:
        power = jnp.maximum(self.alpha - 1, EPSILON)
        return (p ** power + nu) ** (1 / power)

    def _dual(self, p: Array, nu: Array) -> Array:
        """`q` with `q = p + nu q ** (2 - alpha)`: there `(q - p) q ** (alpha - 2)`, which rises with `q`, is `nu`."""
        return _root(lambda q: (q - p) * q ** (self.alpha - 2) - nu, p, jnp.ones_like(p))

    def divergence(self, x: Array, y: Array) -> Array:
        """That of each pair of numbers."""
        a = jnp.maximum(self.alpha, 1 + EPSILON)
        general = (x ** a - y ** a - a * y ** (a - 1) * (x - y)) / (a * (a - 1))
        log = jnp.where(x > 0, x * (jnp.log(jnp.where(x > 0, x, 1)) - jnp.log(jnp.where(y > 0, y, 1))), 0) - x + y
        return jnp.where(self.alpha - 1 < EPSILON, log, general)


EPSILON = 1e-3
"""So near to 1 `alpha` counts as 1, where powers of float32 say nothing any more."""


def _root(f: object, low: Array, high: Array) -> Array:
    """Where a rising function is 0."""
    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        middle = (low + high) / 2
        above = f(middle) > 0           # type: ignore[operator]
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, STEPS, halve, (low, jnp.broadcast_to(high, jnp.shape(low))))
    return jax.tree.map(lambda a, b: (a + b) / 2, low, high)
