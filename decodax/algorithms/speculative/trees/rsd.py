"""RSD-S: a draft tree by stochastic beam search ("Recursive Speculative Decoding: Accelerating LLM Inference via
Sampling Without Replacement", Jeon, Gagrani, Goel, Park, Lee, Lott, 2024; stochastic beams: Kool et al., 2019).

Each path has a log-probability with Gumbel noise, G, and a layer keeps the `width` children with the largest G. Given
the G of a node, its children have Gumbel-perturbed log-probabilities conditioned on their maximum being that G. So the
first child has its parent's G. The G of the k-th child is a Gumbel variable at the log-probability that the children
before it leave, truncated at the G of the one before. The order of the perturbed children is a draw without replacement
from q, and *which* token comes next is independent of its G. Therefore the tokens are drawn here in that order, and
their G with separate noise. The distribution is the same, without a Gumbel variable for every token of the vocabulary.

For the same reason, truncation by G keeps the children true draws without replacement from q at their node, and
rejection sibling by sibling with the node's own q (`MultiRound()`, the paper's recursive rejection) keeps the target's
distribution. RSD-C, a constant number of children drawn without replacement, is `Fixed.balanced` with `MultiRound()`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Children, Grower, Growth, Shape, distinct
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.algorithms.speculative.trees.layers import at_least, drawn_from, grow_layers, left_before
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class StochasticBeam(Shape):
    """A tree of `length` layers with `width` nodes each, drawn without replacement by stochastic beam search. For
    `MultiRound()`, and for `SeedExact`, under which siblings are the most likely tokens.

    Greedy rows have no noise; their tree is that of a beam search of the draft.

    Attributes:
        width: number of nodes of a layer.
        length: number of layers.

    Raises:
        ValueError: a number below 1, or, when the tree grows, a verifier that needs siblings drawn with replacement.
    """

    width: int = 4
    length: int = 4

    def __post_init__(self) -> None:
        at_least(width=self.width, length=self.length)

    def check_drawn(self, drawn: Drawn) -> None:
        distinct(self, drawn)

    @property
    def least_nodes(self) -> int:
        return self.width * self.length

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        self.check_drawn(grower.drawn)

        def perturbed(g: Growth, slots: Array, children: Children, path: Any) -> tuple[Array, Any]:
            phi, top = path
            log_q = drawn_from(children)
            noise = grower.uniforms(g, slots, self.width)[..., 0]
            at, G = phi[..., None] + left_before(log_q), [top]
            for k in range(1, self.width):
                G.append(below(G[-1], at[..., k], noise[..., k]))
            value = jnp.where(grower.policy.greedy[:, None, None], phi[..., None] + log_q, jnp.stack(G, -1))
            return value, (phi[..., None] + log_q, value)

        zero = jnp.zeros((grower.s.batch, 1))
        return grow_layers(grower, state, perturbed, (zero, zero), nodes=self.width * self.length, depth=self.length,
                           width=self.width, fanout=self.width, keep=self.width)


def below(top: Array, location: Array, u: Array) -> Array:
    """Returns samples of a Gumbel distribution with location `location`, conditioned on being at most `top`, from
    uniform random numbers `u`; all four have the same shape. -inf where `location` or `top` is."""
    there = (location > -jnp.inf) & (top > -jnp.inf)
    location, top = jnp.where(there, location, 0), jnp.where(there, top, 0)
    return jnp.where(there, location - jnp.logaddexp(location - top, jnp.log(-jnp.log(u))), -jnp.inf)


@ALGORITHMS.register("rsd-s",
                     "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
                     "Jeon et al. 2024", family="speculative-tree", needs="a draft model",
                     guarantee="distribution-exact")
def rsd_s(draft: Any, width: Count = 4, length: Count = 4) -> Speculative:
    """Drafts a tree by stochastic beam search, verified by recursive rejection sampling.

    For sampled texts: complete paths are drawn without replacement, so likely paths are deep.

    Args:
        draft: the draft model.
        width: number of nodes of a layer.
        length: number of layers.
    """
    return Speculative(DraftModel(draft), MultiRound(), StochasticBeam(width, length))
