"""DSpark: a block head with a sequential correction, and chains that end where a rejection is likely (Cheng et al.,
2026).

The Markov head adds a low-rank function of the draft before to the logits of a slot. The confidence head predicts the
probability that the next draft is accepted, from the slot's hidden state and the draft before. A chain ends where the
product of these falls below a threshold, or the lengths of all rows are chosen together by the load
(`LoadAwareChains`). The prediction for a draft does not depend on the draft itself, so a draft that is kept is still a
draw from its distribution, and every verifier keeps its guarantee. `decodax.train.fit_confidence` fits a temperature of
the predicted probabilities for each slot, by their cross-entropy. The
authors' code for it was not at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.source import Children, Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.shared_chains import SharedChains
from decodax.algorithms.speculative.trees.threshold import check_chance, foretold, grow_chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class SurvivalChain(Shape):
    """A chain of the drafts that are all accepted with at least a given probability, as the source predicts it
    (`Answer.chance`).

    Attributes:
        length: largest number of drafts.
        threshold: the probability; 0: all drafts are kept.

    Raises:
        ValueError: a length below 1, a threshold outside [0, 1], or, when the chain grows, a source that predicts none.
    """

    length: int = 7
    threshold: float = 0.3
    branches = False

    def __post_init__(self) -> None:
        at_least(length=self.length)
        check_chance("threshold", self.threshold)

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        return grow_chain(grower, state, self.length, foretold,
                          lambda f, all_of_them: all_of_them >= self.threshold, unseen=True)


@dataclasses.dataclass(frozen=True)
class LoadAwareChains(SharedChains):
    """Chains whose lengths are chosen by the load: DSpark's scheduler (Cheng et al., 2026).

    Drafts are added in the order of their predicted survival, the probability that they and those before them are
    accepted, until one of them would lower the expected number of tokens of the batch per second. The rule stops at the
    first such draft, so it never sees a draft, or one after it, before that draft is kept.

    Attributes:
        times: numbers of verified tokens of the batch in a round, the newest ones included, in ascending order, each
            with the seconds of the round; between them the time is interpolated (`measure.round_times`).
        length: largest number of drafts of a row.

    Raises:
        ValueError: a length below 1, no times, numbers that do not ascend, or a time that is not positive.
    """

    times: tuple[tuple[int, float], ...]
    length: int = 7

    def __post_init__(self) -> None:
        at_least(length=self.length)
        tokens = [n for n, _ in self.times]
        if not tokens or sorted(set(tokens)) != tokens or min(seconds for _, seconds in self.times) <= 0:
            raise ValueError(f"times: got {self.times}, takes ascending numbers of tokens with positive seconds")

    def log_chance(self, child: Children) -> Array:
        return jnp.log(foretold(child, jnp.zeros((), jnp.int32)))

    def count(self, log_p: Array, rows: Array) -> Array:
        tokens, seconds = (jnp.array(x, jnp.float32) for x in zip(*self.times, strict=True))
        gained = rows + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.exp(log_p))])
        speed = gained / jnp.interp(rows + jnp.arange(len(log_p) + 1, dtype=jnp.float32), tokens, seconds)
        return (speed[1:] >= speed[:-1]).astype(jnp.int32).cumprod().sum(dtype=jnp.int32)


@ALGORITHMS.register("dspark", "DSpark (arXiv 2607.05147)",
                     "Cheng et al. 2026", family="speculative-linear", needs="a trained drafter",
                     guarantee="seed-exact")
def dspark(lm: Any, draft: Any = None, length: Count | None = None, threshold: Share | None = 0.3, batch: Count = 1,
           verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens in one pass, corrected by the draft before, up to where a rejection is likely.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: largest number of drafts that are verified; None: all that the block predicts.
        threshold: predicted probability that all drafts are accepted below which the chain ends; not used for a head
            without a confidence head. None: the lengths of all rows are chosen together for the most tokens per
            second, by the time of rounds, which is measured when the method is made.
        batch: number of rows for which the time is measured.
        verify: the rule that accepts drafts; None: seed-exact.

    Raises:
        ValueError: a threshold of None for a head without a confidence head.
    """
    source, verify = BlockDraft.trained(lm, draft, "dspark"), verify or SeedExact()
    longest = source.within(length)
    if threshold is not None:
        cut = source.head.confidence is not None
        return Speculative(source, verify, SurvivalChain(longest, threshold) if cut else Chain(longest))
    if source.head.confidence is None:
        raise ValueError("threshold: got None, takes a number for a head without a confidence head")
    from decodax.algorithms.speculative.adaptive.measure import round_times  # which imports the heads

    return Speculative(source, verify, LoadAwareChains(round_times(lm, source, longest, batch=batch), longest),
                       packed=True)
