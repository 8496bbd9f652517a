"""The verifier of target-initialised multi-candidate decoding: the longest branch wins (Lu et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.tree import Drawn, Tree, at_end, at_parents, deepest
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.relaxed import before_temperature
from decodax.core.state import State
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True)
class LongestBranch(Verifier):
    """A first token holds if it is among the target's `k` likeliest, every later one if it is what the target draws at
    its parent; of all branches the longest is taken, and of equal ones the first. For `TargetRooted` drafts.

    "Improving Multi-candidate Speculative Decoding" (Lu, Zeng, Ma, Yu, Levorato 2024). The round ends with the last
    accepted draft. The token after it is not drawn: the k likeliest are the first tokens of the next round's branches.

    Approximate. The first token of a round is chosen for what the draft could continue, not by the target's
    distribution, and a greedy row may leave the most likely token for a less likely one. That is the paper's rule and
    its gain, and there is no exact one: of several first tokens an exact rule can keep only the one that the target
    draws, which is known before anything is drafted, so the other branches would be drafted for nothing. `SeedExact`
    with the same drafts settles that token at once and gives plain decoding's tokens.

    Two variants. In the paper's code a sampled first level is drawn without replacement; here it is the target's own
    draw, as far as the kept logits tell, and then the likeliest, so that on a tie the row stays with plain sampling. A
    later token passes there with probability min(1, p / q), each sibling by itself; here by the target's keyed draw, so
    that what follows a first token is the target's own sample.

    Raises:
        ValueError: k below 1.
    """

    k: int = 4
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "coupled"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k: got {self.k}, takes at least 1")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        drawn = dist.draw()
        root = before_temperature(dist.first(1))[:, 0]
        likely, candidates = top_k(root, min(self.k, root.shape[-1]))
        among = (tree.tokens[..., None] == candidates[:, None]) & (likely > -jnp.inf)[:, None]
        holds = at_parents(tree, drawn) == tree.tokens
        path, accepted = deepest(tree, holds | (among.any(-1) & (tree.depth == 1)))
        last = at_end(tree.tokens, path, accepted)
        return path, jnp.maximum(accepted - 1, 0), jnp.where(accepted > 0, last, drawn[:, 0])
