"""P-EAGLE: EAGLE-3's head, with all drafts of a round in one pass (Hui et al., 2026).

Pairs of a mask token and a learned feature follow the newest pair; each attends to the verified pairs and to those
before it. Their keys and values are not kept. Training: `decodax.train.drafting.masked.MaskedPairs`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import HeadState, TrainedHead
from decodax.algorithms.speculative.source import Answer, Level
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short
from decodax.core.capabilities import truncate
from decodax.core.state import State
from decodax.core.types import Params
from decodax.core.window import causal, take
from decodax.models.drafters.head import DraftHead
from decodax.models.drafters.parallel import ParallelHead


@dataclasses.dataclass(frozen=True)
class ParallelDraft(TrainedHead):
    """Drafts with a trained `ParallelHead`, which predicts all tokens of a round in one pass. The attributes are those
    of `TrainedHead`: the target, the head's network, its weights and the target's number of logits."""

    __repr__ = short

    head: ParallelHead
    takes: ClassVar[tuple[type[DraftHead], str]] = ParallelHead, "one with a ParallelHead"

    def start(self, params: Params, s: State, state: HeadState, room: int) -> tuple[HeadState, Answer]:
        h = self.head
        # a row that goes on after its end keeps no pairs of tokens that were cut
        cache = None if state.cache is None else truncate(state.cache, s.length - 1 - state.skipped)
        hidden = state.hidden[:, None]
        if (more := min(h.drafts, room + 1) - 1) > 0:
            masks = jnp.full((s.batch, more), h.mask, jnp.int32)
            unknown = h.unknown(params.draft.head).astype(self._dtype(params))
            window = causal(masks, s.length - 1 - state.skipped)
            step = self._step(params, window, jnp.broadcast_to(unknown, (s.batch, more, unknown.shape[-1])), 0, cache)
            hidden = jnp.concatenate([hidden, step.hidden], 1)
        return (state.replace(cache=cache, states=hidden),
                Answer(self._logits(params, hidden[:, :1], 0), hidden[:, :1]))

    def check_chained(self) -> None:
        raise ValueError("draft: a P-EAGLE head takes nodes of one depth at a time, no chain of several nodes")

    def extend(self, params: Params, s: State, state: HeadState, level: Level) -> tuple[HeadState, Answer]:
        assert state.states is not None
        if level.chained and level.tokens.shape[1] > 1:
            self.check_chained()
        depth = level.positions - s.length[:, None] + 1
        hidden = take(state.states, jnp.minimum(depth, state.states.shape[1] - 1))
        return state, Answer(self._logits(params, hidden, depth), hidden)


@ALGORITHMS.register("p-eagle", "P-EAGLE (arXiv 2602.01469)", "Hui et al. 2026",
                     family="speculative-linear", needs="a trained drafter", guarantee="seed-exact")
def p_eagle(lm: Any, draft: Any = None, length: Count | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a chain in one pass of an EAGLE-3 head with mask tokens.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of drafts; None: as many as the head was trained for.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = ParallelDraft.trained(lm, draft, "p-eagle")
    return Speculative(source, verify or SeedExact(), Chain(length or source.head.drafts))
