"""Target-initialised drafts: the target's own last logits pick the first tokens, and another source continues each
("Improving Multi-candidate Speculative Decoding", Lu, Zeng, Ma, Yu, Levorato, 2024).

MCSD draws the newest token from the
target, then all candidates from the draft model. Here a round does not settle the token after the last accepted one:
the target's distribution there, known from the round that accepted it, names the k first tokens of the next round's
branches, and the draft model grows each of them. `LongestBranch` verifies such trees and says what that guarantees;
`Sliced` is the paper's tree.

Of the distribution the `keep` largest logits are carried from round to round, and processed by the policy like the
draft's (logits, since a repetition penalty looks at their sign). Where none is known, after the prompt and wherever a
verifier has settled the newest token by a draw of its own, the source gives the first tokens too. So with a verifier
that always does, every exact one, these drafts are the source's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.source import Answer, Draft, Source, SourceAround
from decodax.algorithms.speculative.trees.sliced import Sliced
from decodax.algorithms.speculative.trees.threshold import Predictor, probability
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.longest_branch import LongestBranch
from decodax.common.options import Share
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k


@struct
class Rooted(Struct):
    """The state of `TargetRooted`: the target's distribution of the token after the newest one.

    Attributes:
        tokens: `i32[B, keep]`. logits: `f32[B, keep]` the target's logits of them, all -inf if nothing is known.
        source: the state of the source that continues.
    """

    tokens: Array
    logits: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class TargetRooted(SourceAround):
    """Drafts first tokens from the target's last distribution, and their continuations from another source.

    Attributes:
        source: a `Source` over the target's vocabulary, such as a `DraftModel`.
        keep: number of logits that are carried; at least as many as the tree has first tokens, and some more for those
            that the policy forbids.

    Raises:
        ValueError: keep below 1, or a draft that makes its own trees; in tracing, fewer tokens than are kept.
    """

    source: Source
    keep: int = 16

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep: got {self.keep}, takes at least 1")
        if isinstance(self.source, Draft):
            raise ValueError(f"source: {type(self.source).__name__} makes its own trees, takes a Source")

    def init(self, params: Params, s: State) -> Rooted:
        return self._nothing(s, self.source.init(params, s))

    def start(self, params: Params, s: State, state: Rooted, room: int) -> tuple[Rooted, Answer]:
        inner, answer = self.source.start(params, s, state.source, room)
        logits = answer.logits
        if self.keep > logits.shape[-1]:
            raise ValueError(f"keep: got {self.keep}, takes at most {logits.shape[-1]}, the vocabulary")
        put = jax.vmap(lambda row, at, x: row.at[at].set(x))
        own = put(jnp.full((s.batch, logits.shape[-1]), -jnp.inf, logits.dtype), state.tokens, state.logits)
        known = (state.logits > -jnp.inf).any(-1)
        return state.replace(source=inner), answer.replace(logits=jnp.where(known[:, None, None], own[:, None], logits))

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Rooted) -> Rooted:
        inner = self.source.observe(s, window, out, decision, state.source)
        if decision is None:
            return self._nothing(s, inner)
        # a verifier that held its own token back ends on a draft, the next node of its path
        last = jnp.minimum(decision.count, decision.source.shape[1] - 1)[:, None]
        node = jnp.where(decision.count[:, None] < decision.source.shape[1], take(decision.source, last), 0)
        logits, tokens = top_k(out.logits(node)[:, 0], state.tokens.shape[1])
        return Rooted(tokens=tokens.astype(jnp.int32), logits=jnp.where(node > 0, logits, -jnp.inf), source=inner)

    def _nothing(self, s: State, source: Any) -> Rooted:
        return Rooted(tokens=jnp.broadcast_to(jnp.arange(self.keep, dtype=jnp.int32), (s.batch, self.keep)),
                      logits=jnp.full((s.batch, self.keep), -jnp.inf, jnp.float32), source=source)


@ALGORITHMS.register("improved-mcsd", "Improving Multi-candidate Speculative Decoding",
                     "Lu, Zeng, Ma, Yu, Levorato 2024", family="speculative-tree", needs="a draft model",
                     guarantee="approximate")
def improved_mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 1, 1), threshold: Share = 0.3,
                  predictor: Predictor = probability, verify: Verifier | None = None) -> Speculative:
    """Lets the target pick the first tokens of several branches, and keeps the longest branch that holds.

    Drafting stops when a rejection is likely, by the draft's own probability or a fitted predictor. More drafts hold
    than under `mcsd`, and the text is not plain decoding's.

    Args:
        draft: the draft model.
        branching: number of children of each node, level by level.
        threshold: chance of being reached below which a level is not drafted.
        predictor: chance that a draft is accepted; default its probability, or from `decodax.train.fit_predictor`.
        verify: rule that accepts drafts; None: the paper's.
    """
    shape = Sliced(Fixed.balanced(*branching), threshold, predictor)
    source = TargetRooted(DraftModel(draft), min(16, draft.vocab_size))
    return Speculative(source, verify or LongestBranch(branching[0]), shape)
