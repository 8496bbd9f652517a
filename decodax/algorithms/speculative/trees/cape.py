"""CaPE, confidence-aware proposal expansion: a chain with additional candidates at each position ("GliDe with a CaPE: A
Low-Hassle Method to Accelerate Speculative Decoding", Du et al., 2024).

The less confident the draft is at a position, the more siblings the chain's token gets there: 7 if the largest
probability is at most 0.3, 5 up to 0.6, 3 up to 0.8 and 1 above; with the chain's token these are the authors' 8, 6, 4
and 2. If a sibling of the chain is accepted, the round ends there.

The number of candidates depends on the distribution at the position and not on the drawn tokens, so these are valid
draws, and every verifier for trees keeps its guarantee.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Children, Grower, Growth, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class CaPE(Shape):
    """A chain with more siblings at positions where the draft is less confident (Du et al., 2024).

    Attributes:
        length: number of drafts in the chain.
        bins: pairs of an upper bound of the confidence, ascending to 1, and the number of candidates up to it,
            including the chain's own token.
        nodes: largest number of drafts in all, which sets the width of the target's forward pass. The chain comes
            first, then siblings from the first position on. None: all candidates of every bin.

    Raises:
        ValueError: a length below 1, bins that do not ascend to 1 or have no candidate, or fewer nodes than the chain.
    """

    length: int = 5
    bins: tuple[tuple[float, int], ...] = ((0.3, 8), (0.6, 6), (0.8, 4), (1.0, 2))
    nodes: int | None = None

    def __post_init__(self) -> None:
        at_least(length=self.length)
        bounds = [bound for bound, _ in self.bins]
        if not bounds or bounds[-1] != 1 or bounds != sorted(set(bounds)) or min(n for _, n in self.bins) < 1:
            raise ValueError(f"bins: got {self.bins}, takes bounds that ascend to 1, each with 1 candidate or more")
        if self.nodes is not None and self.nodes < self.length:
            raise ValueError(f"nodes: got {self.nodes}, takes at least the length, {self.length}")

    @property
    def fanout(self) -> int:
        return max(count for _, count in self.bins)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        K, R = self.length, self.fanout
        bounds = jnp.array([bound for bound, _ in self.bins[:-1]])
        counts = jnp.array([count for _, count in self.bins], jnp.int32)

        def look(c: Children) -> tuple[Array, Array, Array | None]:
            confidence = jnp.exp(c.log_all.max(-1))
            asked = counts[jnp.searchsorted(bounds, confidence)]
            return c.tokens[:, 0], c.live[:, 0] & (jnp.arange(R) < asked), \
                None if c.log_q is None else c.log_q[:, 0]

        def visit(carry: tuple[Growth, Array], _: None) -> Any:
            g, newest = carry
            g, children = grower.expand(g, newest[:, None], g.filled[None, None] - 1, R)
            found = look(children)
            return (g, found[0][:, 0]), found

        g, children = grower.start(state, K - 1, R)
        first = look(children)
        (g, _), rest = jax.lax.scan(visit, (g, first[0][:, 0]), None, K - 1)
        tokens, live, log_q = jax.tree.map(lambda x, y: jnp.swapaxes(jnp.concatenate([x[None], y]), 0, 1), first, rest)
        # the chain, then the nodes beside it, position by position and without the gaps
        spare = (self.nodes or K * R) - K
        live = live & jnp.cumprod(live[:, :, :1].astype(jnp.int32), 1, dtype=jnp.int32).astype(bool)
        flat = lambda x: x[:, :, 1:].reshape(x.shape[0], -1)
        at = jnp.argsort(~flat(live), axis=1, stable=True)[:, :spare]
        beside = lambda x: jnp.take_along_axis(flat(x), at, 1)
        chain = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (at.shape[0], K))
        parents = jnp.concatenate([chain, (at // max(R - 1, 1)).astype(jnp.int32)], 1)
        proposal = Proposal(tokens=jnp.concatenate([tokens[:, :, 0], beside(tokens)], 1),
                            live=jnp.concatenate([live[:, :, 0], beside(live)], 1), parents=parents, log_q=log_q)
        return proposal, g.source, jnp.arange(1, K, dtype=jnp.int32)[None]


@ALGORITHMS.register("cape", "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding (its tree)",
                     "Du et al. 2024", family="speculative-tree", needs="a draft model", guarantee="seed-exact")
def cape(draft: Any, length: Count = 5, nodes: Count | None = 12) -> Speculative:
    """Drafts a chain with more sibling candidates where the draft model is less confident.

    It takes as many draft steps as a chain; the siblings only widen the window.

    Args:
        draft: the draft model.
        length: number of drafts in the chain.
        nodes: largest number of drafts in all; None: all candidates.
    """
    return Speculative(DraftModel(draft), shape=CaPE(length, nodes=nodes))
