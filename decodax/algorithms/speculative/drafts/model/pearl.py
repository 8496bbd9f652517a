"""PEARL: the draft model writes the next chain while the target verifies the last one ("PEARL: Parallel Speculative
Decoding with Adaptive Draft Length", Liu et al., 2024).

In a round both models read the same text: the verified tokens and the pending drafts after them. The target verifies
the pending drafts (post-verify), and, by its prediction after them, the first token that the draft model writes
meanwhile; without pending drafts it verifies that token alone (pre-verify). If all of them hold, the rest of what was
written is pending in the next round. If one does not, what was written is dropped, and nothing is pending. So the
number of drafts accepted in a row has no bound and adapts to the draft model.

Neither model depends on what the other computes in the round. With devices of their own
(`decodax.algorithms.speculative.halves`) a round takes as long as the longer of the two; on shared devices the time for
dropped tokens is lost.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.overlap import Overlapping
from decodax.algorithms.speculative.source import Grower, Source, fitted
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.common.options import Range
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@struct
class Ahead(Struct):
    """The state of `Pearl`.

    Attributes:
        source: the state of the source. waits: `bool[B]`, True if the drafts `waiting` `i32[B, gamma - 1]` are pending.
        written: `i32[B, gamma]` tokens written in this round.
    """

    source: Any
    waiting: Array
    waits: Array
    written: Array


@dataclasses.dataclass(frozen=True)
class Pearl(Overlapping):
    """Drafts chains of a source, written one round ahead of the target.

    Attributes:
        source: a `Source` that can be asked about a chain of nodes at once, such as `DraftModel`.
        gamma: tokens that the source writes in a round, 2 or more.
    """

    source: Source
    gamma: int = 4
    written: ClassVar[tuple[str, ...]] = ("written",)

    def __post_init__(self) -> None:
        if self.gamma < 2:
            raise ValueError(f"gamma: got {self.gamma}, takes at least 2")

    @property
    def length(self) -> int:
        return self.gamma - 1

    def init(self, params: Params, s: State) -> Ahead:
        none = jnp.zeros((s.batch, self.gamma), jnp.int32)
        return Ahead(self.source.init(params, s), none[:, 1:], jnp.zeros(s.batch, bool), none)

    def offer(self, params: Params, s: State, state: Ahead) -> tuple[Proposal, Ahead]:
        live = jnp.broadcast_to(state.waits[:, None], state.waiting.shape)
        return Proposal(tokens=state.waiting, live=live), state

    def write(self, params: Params, policy: Any, s: State, state: Ahead, drawn: Drawn) -> Ahead:
        source, K = fitted(self.source, policy.vocab_size), self.length
        grower = Grower(source, params, policy, s, drawn)
        # the pending drafts are in slots 1 to K; in rows without any, nothing is below them
        g, first = grower.start(state.source, 2 * K, 1)
        g, behind = grower.expand(g, state.waiting, jnp.zeros((1, 1), jnp.int32), 1, chained=True)
        token = jnp.where(state.waits, behind.tokens[:, -1, 0], first.tokens[:, 0, 0])
        parent, written = jnp.where(state.waits, K, 0), [token]
        for i in range(K):
            g, after = grower.expand(g, token[:, None], parent[:, None], 1)
            token, parent = after.tokens[:, 0, 0], jnp.full_like(parent, K + 1 + i)
            written.append(token)
        nodes = jnp.concatenate([jnp.arange(1, K + 1, dtype=jnp.int32), jnp.full(K, -1, jnp.int32)])[None]
        return state.replace(source=source.place(g.source, nodes), written=jnp.stack(written, 1))

    def learn(self, s: State, window: Window, out: Out, decision: Decision | None, seen: None, state: Ahead) -> Ahead:
        source = self.source.observe(s, window, out, decision, state.source)
        if decision is None or decision.accepted is None:
            return state.replace(source=source, waits=jnp.zeros_like(state.waits))
        own = jnp.take_along_axis(decision.tokens, decision.accepted[:, None], 1)[:, 0]
        held = decision.accepted == jnp.where(state.waits, self.length, 0)
        whole = decision.count == decision.accepted + 1         # a cache may cut what was accepted
        waits = held & whole & (own == state.written[:, 0])
        return state.replace(source=source, waiting=state.written[:, 1:], waits=waits)


@ALGORITHMS.register("pearl", "PEARL: Parallel Speculative Decoding with Adaptive Draft Length", "Liu et al. 2024",
                     family="speculative-linear", needs="a draft model", guarantee="seed-exact")
def pearl(draft: Any, gamma: Annotated[int, Range(2)] = 4) -> Speculative:
    """Has the draft model write the next chain while the target verifies the last one.

    It pays with devices of their own for both models, `decodax.apart`.

    Args:
        draft: the draft model. gamma: tokens that it writes in a round.
    """
    return Speculative(Pearl(DraftModel(draft), gamma))
