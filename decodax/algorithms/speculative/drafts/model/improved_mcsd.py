"""Target-initialised drafts: the target's own last logits give the first tokens of the branches, and another source
continues each ("Improving Multi-candidate Speculative Decoding", Lu, Zeng, Ma, Yu, Levorato, 2024).

MCSD draws the newest token from the target, then all candidates from the draft model. Here a round does not decide the
token after the last accepted one. The target's distribution there, known from the round that accepted it, gives the k
first tokens of the next round's branches, and the draft model continues each of them. `LongestBranch` verifies such
trees and describes the guarantee; `Sliced` is the paper's tree.

The `keep` largest logits of this distribution are carried from round to round. The policy is applied to them as to the
draft's logits (logits instead of probabilities, since a repetition penalty depends on their sign). If no distribution
is known, after the prompt and after a verifier that has drawn the newest token itself, the source gives the first
tokens, too. So with an exact verifier, which always draws that token, these drafts are the source's own.
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
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k


@struct
class Rooted(Struct):
    """State of `TargetRooted`: the target's distribution of the token after the newest one.

    Attributes:
        tokens: `i32[B, keep]`, the most likely tokens.
        logits: `f32[B, keep]`, the target's logits for them; all -inf if they are not known.
        source: the state of the source that continues the branches.
    """

    tokens: Array
    logits: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class TargetRooted(SourceAround):
    """Drafts first tokens from the target's last distribution, and their continuations with another source (Lu et al.,
    2024).

    Attributes:
        source: a `Source` over the target's vocabulary, such as a `DraftModel`.
        keep: number of logits that are carried; at least the number of first tokens in the tree, and some more for
            tokens that the policy forbids.

    Raises:
        ValueError: `keep` is below 1, or a draft that makes its own trees; or, while it is traced, fewer tokens than
            `keep`.
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

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Rooted) -> Rooted:
        inner = self.source.observe(params, s, window, out, decision, state.source)
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
def improved_mcsd(draft: Any, branching: tuple[Count, ...] = (4, 2, 1, 1), threshold: Share = 0.3,
                  predictor: Predictor = probability, verify: Verifier | None = None) -> Speculative:
    """Takes the first tokens of several branches from the target, and accepts the longest branch.

    Drafting stops when a rejection is likely, by the draft's own probability or a fitted predictor. More drafts are
    accepted than with `mcsd`, and the text is not that of plain decoding.

    Args:
        draft: the draft model.
        branching: number of children of each node, by level.
        threshold: predicted probability of being reached below which a level is not drafted.
        predictor: predicts the probability that a draft is accepted; default the draft's own probability; or a result
            of `decodax.train.fit_predictor`.
        verify: the rule that accepts drafts; None: the paper's, `LongestBranch`.
    """
    shape = Sliced(Fixed.balanced(*branching), threshold, predictor)
    source = TargetRooted(DraftModel(draft), min(16, draft.vocab_size))
    return Speculative(source, verify or LongestBranch(branching[0]), shape)
