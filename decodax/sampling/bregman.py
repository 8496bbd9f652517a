"""Bregman top-k: one objective determines both the number of tokens that are kept and their probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import static, struct
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Context, PyTree, Transform
from decodax.sampling.threshold import probabilities

STEPS = 32
"""Number of bisection steps."""


@struct
class BregmanTopK(Transform):
    """The sparse distribution `q` that minimises `D(q, p) + cost * (number of tokens of q)` (Noarov et al., 2025).

    `D` is the separable Bregman divergence of `x ** alpha / (alpha (alpha - 1))`. The best `q` lies on the `k` most
    likely tokens, and the objective falls and then rises with `k`; both `k` and `q` depend on the distribution. At
    `alpha` 1 the divergence is the Kullback-Leibler divergence, and `q` is top-k sampling with an adaptive `k`.

    Attributes:
        cost: `f32[B]`, the cost of each kept token; 0 keeps all.
        alpha: `f32[B]`, 1 or larger.
        dual: static; True minimises `D(p, q)` instead.
        limit: static; the largest number of tokens that can be kept.
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
        # Cumulative divergence of the tokens that are removed.
        power = jnp.where(p > 0, p, 0) ** self.alpha
        lost = power / (self.alpha * jnp.maximum(self.alpha - 1, EPSILON)) if self.dual else power / self.alpha
        head = jnp.cumsum(lost[ids])

        def total(k: Array) -> Array:
            inside = jnp.arange(best.shape[0]) < k
            q = self.nearest(best, inside)
            paid = jnp.where(inside, self.divergence(best, q) if self.dual else self.divergence(q, best), 0).sum()
            return paid + (lost.sum() - head[k - 1]) + self.cost * k

        def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = span                # the minimum lies within [low, high]
            middle = (low + high) // 2
            rises = total(middle + 1) >= total(middle)
            return jnp.where(rises, low, middle + 1), jnp.where(rises, middle, high)

        steps = max(best.shape[0] - 1, 1).bit_length()
        k = lax.fori_loop(0, steps, halve, (jnp.int32(1), count.astype(jnp.int32)))[0]
        q = self.nearest(best, jnp.arange(best.shape[0]) < k)
        kept = jnp.full_like(logits, -jnp.inf).at[ids].set(jnp.log(q))
        return jnp.where((self.cost == 0) | jnp.isnan(logits).any() | (count == 0), logits, kept)

    def nearest(self, p: Array, inside: Array) -> Array:
        """Returns the probabilities on the tokens `inside` (`bool[n]`) that are nearest to `p` (`f32[n]`) in the
        Bregman divergence: `f32[n]`, 0 for all other tokens, with sum 1."""
        def at(nu: Array) -> Array:
            return jnp.where(inside, self._dual(p, nu) if self.dual else self._primal(p, nu), 0)

        # The multiplier is 0 if all tokens stay, and at most 1, where a single token would be certain.
        nu = _root(lambda nu: at(nu).sum() - 1, jnp.float32(0), jnp.float32(1))
        q = jnp.where(self.alpha - 1 < EPSILON, jnp.where(inside, p, 0), at(nu))
        return q / q.sum()

    def _primal(self, p: Array, nu: Array) -> Array:
        power = jnp.maximum(self.alpha - 1, EPSILON)
        return (p ** power + nu) ** (1 / power)

    def _dual(self, p: Array, nu: Array) -> Array:
        """Solves `q = p + nu q ** (2 - alpha)`: `(q - p) q ** (alpha - 2)`, which increases with `q`, equals `nu`."""
        return _root(lambda q: (q - p) * q ** (self.alpha - 2) - nu, p, jnp.ones_like(p))

    def divergence(self, x: Array, y: Array) -> Array:
        """Returns the Bregman divergence of `x` from `y` for each entry by itself, in the common shape of both; their
        sum is the divergence of the distributions."""
        a = jnp.maximum(self.alpha, 1 + EPSILON)
        general = (x ** a - y ** a - a * y ** (a - 1) * (x - y)) / (a * (a - 1))
        log = jnp.where(x > 0, x * (jnp.log(jnp.where(x > 0, x, 1)) - jnp.log(jnp.where(y > 0, y, 1))), 0) - x + y
        return jnp.where(self.alpha - 1 < EPSILON, log, general)


EPSILON = 1e-3
"""An `alpha` nearer to 1 than this counts as 1, since powers of float32 lose their precision there."""


def _root(f: object, low: Array, high: Array) -> Array:
    """Returns the root of an increasing function `f` between `low` and `high`, by bisection."""
    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        middle = (low + high) / 2
        above = f(middle) > 0           # type: ignore[operator]
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, STEPS, halve, (low, jnp.broadcast_to(high, jnp.shape(low))))
    return jax.tree.map(lambda a, b: (a + b) / 2, low, high)
