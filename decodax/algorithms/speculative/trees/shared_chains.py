"""Chains whose lengths are chosen for all rows of a batch together: of all drafts, the most promising are verified."""

from __future__ import annotations

import abc
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.source import Children, Grower, Shape
from decodax.algorithms.speculative.tree import Proposal


class SharedChains(Shape):
    """Base class of chains whose lengths are chosen together: derive a frozen dataclass with a field `length` from it.

    Every row drafts a chain of `length`. Drafts are ordered by the probability that they and all drafts before them in
    their row are accepted, and the first `count` of them are verified. The probability never rises along a chain, so
    each row verifies a prefix. The window has the width of the longest chain; fewer drafts save time only if it is
    packed (`Speculative.packed`).
    """

    branches = False

    @abc.abstractmethod
    def log_chance(self, child: Children) -> Array:
        """Returns the estimated log-probability that the next draft of each row's chain, `child`, is accepted if all
        drafts before it are, `f32[B]`."""

    @abc.abstractmethod
    def count(self, log_p: Array, rows: Array) -> Array:
        """Returns how many drafts are verified, `i32[]`.

        Args:
            log_p: `f32[N]`, the log-probabilities of all drafts in descending order; -inf for those that do not count.
            rows: `i32[]`, number of rows that are running.
        """

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        K, running = self.length, grower.s.running
        g, child = grower.start(state, K - 1, 1)
        children = [child]
        for i in range(K - 1):
            g, child = grower.expand(g, child.tokens[:, 0], jnp.full((1, 1), i), 1)
            children.append(child)
        joined = lambda get: jnp.concatenate([get(child) for child in children], 1)
        live = joined(lambda c: c.live[:, 0]).astype(jnp.int32).cumprod(1).astype(bool) & running[:, None]
        value = joined(lambda c: self.log_chance(c)[:, None]).cumsum(1)
        value = jnp.where(live, value, -jnp.inf).T.reshape(-1)
        # of equal products the shallower first, so that what is kept stays a prefix
        order = jnp.argsort(-value, stable=True)
        rank = jnp.argsort(order).reshape(K, -1).T
        count = self.count(value[order], running.sum(dtype=jnp.int32))
        log_q = None if child.log_q is None else joined(lambda c: c.log_q)
        return (Proposal(tokens=joined(lambda c: c.tokens[:, 0]), live=live & (rank < count), log_q=log_q), g.source,
                jnp.arange(1, K, dtype=jnp.int32)[None])
