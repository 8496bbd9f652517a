"""Typical acceptance: accepts drafts that are not much less likely than a typical token ("Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads", Cai et al., 2024). The output is approximate."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.tree import Drawn, Tree, at_end, at_parents, of_tokens
from decodax.algorithms.speculative.verifier import Guarantee, Verifier
from decodax.algorithms.speculative.verify.relaxed import likeliest
from decodax.common.options import Positive, Range
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import winner


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance(Verifier):
    """Accepts a draft `x` if `p(x) > min(epsilon, delta * exp(-H(p)))`, with the entropy `H` in nats: if it is likely,
    or not much less likely than a typical token (Cai et al., 2024).

    The token after the accepted drafts is the most likely one, as in the paper. Of equally long paths the most likely
    is taken, as in the authors' code. `p` is the row's processed distribution, so greedy rows get exactly the tokens of
    greedy decoding; sampled rows are approximate.

    Attributes:
        epsilon: hard threshold, between 0 and 1.
        delta: factor of the threshold that depends on the entropy, above 0. The authors recommend the square root of
            `epsilon`. Both defaults are those of their code.

    Raises:
        ValueError: a threshold out of range.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    guarantee: ClassVar[Guarantee] = "approximate"
    drawn: ClassVar[Drawn] = "ranked"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon: got {self.epsilon}, takes a number between 0 and 1")
        if not self.delta > 0:
            raise ValueError(f"delta: got {self.delta}, takes a number above 0")

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        log_p = dist.log_probs()
        entropy = -jnp.where(log_p == -jnp.inf, 0, jnp.exp(log_p) * log_p).sum(-1)
        bound = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        chance = of_tokens(tree, log_p)
        path, accepted = likeliest(tree, jnp.exp(chance) > at_parents(tree, bound), chance)
        return path, accepted, at_end(winner(log_p), path, accepted)


@ALGORITHMS.register("typical-acceptance", "Medusa: Simple LLM Inference Acceleration Framework with Multiple "
                     "Decoding Heads (its acceptance)", "Cai et al. 2024", family="speculative-tree",
                     needs="a draft model", guarantee="approximate")
def typical_acceptance(draft: Any, epsilon: Annotated[float, Range(0, 1, above=True, below=True)] = 0.09,
                       delta: Positive = 0.3, shape: Shape | None = Chain(4)) -> Speculative:
    """Accepts drafts of a draft model that are not much less likely than a typical token.

    More drafts are accepted than under an exact rule, and sampled texts have another distribution than in plain
    sampling.

    Args:
        draft: the draft model.
        epsilon: probability above which a draft is always accepted.
        delta: factor of the threshold that falls with the entropy; the authors recommend the square root of `epsilon`.
        shape: shape of the draft tree.
    """
    return Speculative(DraftModel(draft), TypicalAcceptance(epsilon, delta), shape)
