"""Expected Attention: scores tokens by the attention expected from future queries, which are assumed to be distributed
like the past ones ("Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
Devoto et al., 2025)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import Gathered, HeldLayer, Taken, TokenScore
from decodax.caches.evict.selection import Budget, Every, Top
from decodax.caches.rotation import mean_turn, turned
from decodax.common.options import Count, NonNegative, Whole
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class FutureQueries(TokenScore):
    """Base of scores that need the mean of past queries. The mean is taken before rotation and without the queries of
    the first tokens, and is then rotated by the mean rotation of the next positions.

    Attributes:
        n_sink: number of first tokens, which are always kept and whose queries do not count.
        n_future_positions: number of next positions.
    """

    n_sink: Whole = 4
    n_future_positions: Count = 512

    reads = "queries"

    @property
    def always(self) -> int:
        return self.n_sink

    @property
    def squares(self) -> bool:
        """True if the score needs the covariance of past queries beside their mean, so that `gather` also sums the
        outer products of queries. By default False."""
        return False

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        zeros = lambda *rest: jnp.zeros((batch, *rest), jnp.float32)
        more = (zeros(shape.queries, shape.width, shape.width),) if self.squares else ()
        return Gathered(rest=(zeros(), zeros(shape.queries, shape.width), *more))

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        counts = (new.positions >= self.n_sink).astype(jnp.float32)
        q = turned(shape, new.queries.astype(jnp.float32), -new.positions) * counts[..., None, None]
        number, total, *products = gathered.rest
        products = [x + jnp.einsum("bwhi,bwhj->bhij", q, q) for x in products]
        return gathered.replace(rest=(number + counts.sum(1), total + q.sum(1), *products))

    def ahead(self, held: HeldLayer) -> Array:
        """Returns the positions of the next tokens, from `held.length` on: `i32[n_future_positions]`."""
        return held.length + jnp.arange(self.n_future_positions, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(FutureQueries):
    """Scores a token by the expected attention of future queries, times the norm of its value.

    The expected attention is the mean of `exp(q k)` under a Gaussian with the mean and covariance of the past queries,
    divided by its sum over all keys.

    Attributes:
        use_covariance: whether the covariance is used; else only the mean.
        use_vnorm: whether the score is multiplied by the norm of the value.
        epsilon: added to the expected attention before this multiplication.
    """

    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    @property
    def squares(self) -> bool:
        return self.use_covariance

    def __call__(self, held: HeldLayer) -> Array:
        number, total, *products = held.gathered.rest
        number, ahead = jnp.maximum(number, 1), self.ahead(held)
        mean = total / number
        own = mean_turn(held.shape, mean, ahead)
        G, r = held.keys.shape[0], own.shape[0] // held.keys.shape[0]
        score = jnp.einsum("grd,gsd->grs", own.reshape(G, r, -1), held.keys)
        for product in products:
            spread = product / number - mean[:, :, None] * mean[:, None]
            spread = mean_turn(held.shape, mean_turn(held.shape, spread, ahead).swapaxes(1, 2), ahead)
            score += jnp.einsum("gsi,grij,gsj->grs", held.keys, spread.reshape(G, r, *spread.shape[1:]), held.keys) / 2
        counted = held.valid & (held.index >= self.n_sink)
        worth = jax.nn.softmax(score, axis=-1, where=counted[:, None]).mean(1)
        if self.use_vnorm:
            worth = (worth + self.epsilon) * jnp.linalg.norm(held.values, axis=-1)
        return jnp.where(held.index < self.n_sink, jnp.inf, worth)


@CACHES.register("expected-attention",
                 "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
                 "Devoto et al. 2025", family="evict")
def expected_attention(budget: Budget = 0.5, every: Every = None, n_sink: Whole = 4, n_future_positions: Count = 512,
                       use_covariance: bool = True, use_vnorm: bool = True, epsilon: NonNegative = 0.0) -> Eviction:
    """Keeps the tokens with the most expected attention from future queries, assumed to be distributed like the past
    ones.

    The options are those of the authors' code. With `adaptive-expected-attention`, heads share a budget.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        n_sink: number of first tokens that are always kept.
        n_future_positions: number of next positions over which the rotation of queries is averaged.
        use_covariance: use the covariance of past queries, not only their mean.
        use_vnorm: multiply the expected attention by the norm of the value.
        epsilon: added to the expected attention before this multiplication.
    """
    score = ExpectedAttention(n_sink, n_future_positions, use_covariance, use_vnorm, epsilon)
    return Eviction(Top(score), budget, every, name="expected-attention")
