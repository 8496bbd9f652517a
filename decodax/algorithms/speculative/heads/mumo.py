"""MuMo: drafts the rest of a unit of the target language, such as a word ("A Simple Framework to Accelerate
Multilingual Language Model for Monolingual Text Generation", Hong, Lee and Cho, 2024).

Tokenizers of multilingual models cut the words of some languages into many tokens. A trained head predicts whole units
from the hidden state from which the target predicts the next token; its best candidates are verified by the target's
own probabilities of their tokens. Here the target decides the first token before its forward pass, so the candidates
are the units that begin with it. A later pass verifies their other tokens together, as a tree. The paper commits the
candidate that both models like best, so that its output may differ from the target's; with the default verifier it
does not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import TREES, AroundSource, Form
from decodax.algorithms.speculative.drafts.text.history import prefix_tree
from decodax.algorithms.speculative.heads.source import HeadState, TrainedHead, trained
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short
from decodax.core.state import State
from decodax.core.types import Params
from decodax.models.drafters.units import UnitHead


@dataclasses.dataclass(frozen=True)
class UnitCandidates(AroundSource, Draft):
    """Drafts the rest of the units that begin with the newest token and that the head likes best.

    Attributes:
        source: a `TrainedHead` with a `UnitHead`; its `HeadWeights.ids` are the tokens of the units, `i32[U, L]`,
            padded with -1.
        candidates: number of units.

    Raises:
        ValueError: no candidates.
    """

    __repr__ = short

    source: TrainedHead
    candidates: int = 10
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ValueError(f"candidates: got {self.candidates}, takes at least 1")

    @property
    def length(self) -> int:
        return self.source.head.longest or 1

    @property
    def cache_needs(self) -> Any:       # type: ignore[override]
        return self.source.cache_needs | TREES

    def propose(self, params: Params, policy: Any, s: State, state: HeadState,
                drawn: Drawn) -> tuple[Proposal, HeadState]:
        units, weights = params.draft.ids, params.draft.head
        logits = self.source.head.logits(weights, state.hidden[:, None], 0, lambda hidden: hidden)[:, 0]
        # the newest token is the target's own, and the hidden state is that which predicted it
        begins = units[:, 0] == s.newest[:, None]
        best, chosen = lax.top_k(jnp.where(begins, logits, -jnp.inf), min(self.candidates, units.shape[0]))
        count = best.shape[1]
        rank = jnp.where(best > -jnp.inf, count - jnp.arange(count, dtype=jnp.int32), 0)
        return prefix_tree(units[chosen][:, :, 1:], rank, count * (units.shape[1] - 1)), state


@ALGORITHMS.register("mumo", "A Simple Framework to Accelerate Multilingual Language Model for Monolingual Text "
                     "Generation", "Hong, Lee, Cho 2024", family="blockwise-parallel", needs="a trained drafter",
                     guarantee="seed-exact")
def mumo(lm: Any, draft: Any = None, candidates: Count = 10, verify: Verifier | None = None) -> Speculative:
    """Drafts the rest of a word of one language, by a head that predicts whole words.

    For languages whose words the target's tokenizer cuts into many tokens.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        candidates: number of units that are verified together.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    made = trained(lm, draft, "mumo")
    if not isinstance(made.head, UnitHead) or made.weights.ids is None:
        raise ValueError(f"draft: got one with a {type(made.head).__name__}, 'mumo' takes a UnitHead with its units")
    return Speculative(UnitCandidates(made, candidates), verify or SeedExact())
