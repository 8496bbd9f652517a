"""Acceptance rules of blockwise parallel decoding ("Blockwise Parallel Decoding for Deep Autoregressive Models", Stern,
Shazeer, Uszkoreit, 2018): a draft is accepted if it is the most likely token, one of the k most likely, or numerically
near the most likely one. The output is approximate; `Greedy` is exact for greedy rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.tree import Drawn, Tree, at_end, at_parents, deepest, of_tokens
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.relaxed import among, before_temperature, likeliest
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import winner


@dataclasses.dataclass(frozen=True)
class Greedy(Verifier):
    """Accepts a draft if it is the most likely token after its parent. The token after the accepted drafts is the most
    likely one, too.

    Exact for greedy rows (Stern et al. 2018, and the greedy verification of most methods). Rows with a temperature also
    get the most likely tokens, so in general the rule is approximate.
    """

    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        best = winner(dist.processed())
        path, accepted = deepest(tree, at_parents(tree, best) == tree.tokens)
        return path, accepted, at_end(best, path, accepted)


@dataclasses.dataclass(frozen=True)
class TopKAcceptance(Verifier):
    """Accepts a draft if it is among the `k` most likely tokens after its parent.

    It is `SpecVerification` without a bound on the log-probability; with `k=1` it is `Greedy`.

    Raises:
        ValueError: `k` is below 1.
    """

    k: int
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k: got {self.k}, takes at least 1")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return among(dist, tree, self.k, math.inf)


@dataclasses.dataclass(frozen=True)
class Distance(Verifier):
    """Accepts a draft if its id differs by at most `epsilon` from that of the most likely token after its parent, and
    the policy allows it. For tokens whose ids are ordinal, such as pixel intensities.

    The token after the accepted drafts is the most likely one. With `epsilon=0` the rule is `Greedy`.

    Raises:
        ValueError: `epsilon` is below 0.
    """

    epsilon: int
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ValueError(f"epsilon: got {self.epsilon}, takes at least 0")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        logits = before_temperature(dist)
        best = winner(logits)
        above = at_parents(tree, best)
        near = jnp.abs(above - tree.tokens)
        holds = (above >= 0) & (near <= self.epsilon) & (of_tokens(tree, logits) > -jnp.inf)
        path, accepted = likeliest(tree, holds, -near.astype(jnp.float32))
        return path, accepted, at_end(best, path, accepted)


@ALGORITHMS.register("greedy-verification", "Speculative decoding with greedy verification",
                     "Stern, Shazeer, Uszkoreit 2018", family="blockwise-parallel", needs="a draft model",
                     guarantee="approximate")
def greedy_verification(draft: Any, length: Count = 4) -> Speculative:
    """Accepts drafts of a draft model as long as they are the target's most likely tokens.

    Greedy rows get exactly the tokens of greedy decoding. Rows with a temperature also get the most likely tokens.

    Args:
        draft: the draft model.
        length: number of drafts in a round.
    """
    return Speculative(DraftModel(draft), Greedy(), Chain(length))


@ALGORITHMS.register("blockwise-top-k", "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
                     "Stern, Shazeer, Uszkoreit 2018", family="blockwise-parallel", needs="a draft model",
                     guarantee="approximate")
def blockwise_top_k(draft: Any, k: Count = 3, length: Count = 4) -> Speculative:
    """Accepts drafts of a draft model as long as they are among the target's k most likely tokens.

    With a larger `k` more drafts are accepted, and the text differs more from the target's own.

    Args:
        draft: the draft model.
        k: largest rank of an accepted draft; 1 is greedy verification.
        length: number of drafts in a round.
    """
    return Speculative(DraftModel(draft), TopKAcceptance(k), Chain(length))


@ALGORITHMS.register("blockwise-distance",
                     "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
                     "Stern, Shazeer, Uszkoreit 2018", family="blockwise-parallel", needs="a draft model",
                     guarantee="approximate")
def blockwise_distance(draft: Any, epsilon: Whole = 2, length: Count = 4) -> Speculative:
    """Accepts drafts of a draft model as long as their ids are near that of the target's most likely token.

    For models whose token ids are ordinal, such as pixel intensities.

    Args:
        draft: the draft model.
        epsilon: largest difference of ids; 0 is greedy verification.
        length: number of drafts in a round.
    """
    return Speculative(DraftModel(draft), Distance(epsilon), Chain(length))
