"""Parallel speculative sampling: look-ahead embeddings after the newest token let the target predict several tokens in
one forward pass, and a second one verifies them ("PaSS: Parallel Speculative Sampling", Monea et al., 2023).

A round runs the target twice. The first pass reads the newest token and the `K` embeddings after it, and gives `1 + K`
drafts, of which the first has the target's own distribution. So a round writes at least two tokens. Here the second
pass computes the newest token again: with 4 embeddings 9% of the operations of both passes, as compiled for a CPU, and
0.3% of their bytes at batch 1 (a Llama of 125M parameters; 0.9% for the shipped `pycode`), since both read all weights
in any case. If the first pass leaves out layers (S3D), what it computes of that token is not the target's.

Training: the text's own tokens, at places of a text (`decodax.train.drafting.prompt_tokens`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.self.self_draft import layered, whole_text
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.prompted.source import Prompted, PromptTokens
from decodax.algorithms.speculative.source import Answer, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.models.drafters.head import DraftHead
from decodax.models.drafters.prompt_tokens import LookAheadHead


@dataclasses.dataclass(frozen=True)
class LookAheadEmbeddings(PromptTokens):
    """Drafts in one pass of the target over the newest token and trained embeddings after it. Drafts of one depth have
    the same distribution. The pass may leave out layers (`LookAheadHead.skip`).

    The attributes are those of `PromptTokens`.
    """

    __repr__ = short

    head: LookAheadHead
    takes: ClassVar[tuple[type[DraftHead], str]] = LookAheadHead, "look-ahead embeddings"

    def for_target(self, model: Any) -> Self:
        new = super().for_target(model)
        if self.head.skip:
            self.head.kept(layered(new.model).depth)        # which checks them
        return new

    def start(self, params: Params, s: State, state: Prompted, room: int) -> tuple[Prompted, Answer]:
        vectors, K = params.draft.head["prompts"], self.head.heads
        window = causal(jnp.pad(s.newest[:, None], ((0, 0), (0, K))), s.length - 1).replace(
            embeddings=jnp.broadcast_to(jnp.pad(vectors, ((1, 0), (0, 0))), (s.batch, 1 + K, vectors.shape[1])),
            embedded=jnp.broadcast_to(np.arange(1 + K) > 0, (s.batch, 1 + K)))
        keep = (self.head.kept(self.model.depth),) if self.head.skip else ()
        state = Prompted(self.model.apply(params.target, window, whole_text(s), *keep).hidden)
        return super().start(params, s, state, room)

    proposes: ClassVar[frozenset[Form]] = frozenset()

    def probes(self, params: Params, s: State, state: Prompted, proposal: Proposal) -> None:
        return None

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Prompted) -> Prompted:
        return state


@ALGORITHMS.register("pass", "PaSS: Parallel Speculative Sampling", "Monea et al. 2023", family="speculative-self",
                     needs="a trained drafter", guarantee="seed-exact")
def pass_(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts with the target itself, by trained look-ahead embeddings after its newest token.

    A few embeddings are all that is trained and kept in memory. A round has two forward passes and writes at least two
    tokens.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: a chain of the next token and one for each embedding.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = LookAheadEmbeddings.trained(lm, draft, "pass")
    return Speculative(source, verify or SeedExact(), shape or Chain(source.longest))
