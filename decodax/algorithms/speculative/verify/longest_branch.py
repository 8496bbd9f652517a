"""The verifier of multi-candidate decoding with target-initialised trees (Lu et al., 2024): takes the longest
branch."""

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
    """Accepts the longest branch of a tree from `TargetRooted` drafts. The first token of a branch is accepted if it is
    among the target's `k` most likely tokens, a later one if it is the token that the target draws at its parent. Of
    equally long branches the first is taken.

    "Improving Multi-candidate Speculative Decoding" (Lu, Zeng, Ma, Yu, Levorato 2024). The round ends with the last
    accepted draft. The token after it is not drawn, since the k most likely tokens there are the first tokens of the
    branches in the next round.

    Approximate. The first token of a round is chosen by how far the draft can continue it, not by the target's
    distribution, and a greedy row may get a less likely token. This is the paper's rule and its gain. An exact rule
    could accept only the first token that the target draws; since that token is known before anything is drafted, the
    other branches would be useless. `SeedExact` with the same drafts decides that token at once and gives the tokens of
    plain decoding.

    There are two differences from the paper's code. There, the first level of a sampled tree is drawn without
    replacement; here it has the target's own draw, as far as the kept logits determine it, and then the most likely
    tokens, so that with branches of equal length the text is that of plain sampling. There, each later token is
    accepted with probability min(1, p / q) by itself; here it must be the target's own draw, so that the text after the
    first token is the target's own sample.

    Raises:
        ValueError: `k` is below 1.
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
