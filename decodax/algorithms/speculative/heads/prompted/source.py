"""Drafts with the target's own predictions at nodes after each draft, in the forward pass that verifies: trained prompt
tokens (PPD), masks (SPACE), or hidden states that a middle layer has mapped (hidden transfer)."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.by_depth import answer_by_depth, spread
from decodax.algorithms.speculative.drafter import TREES, Form
from decodax.algorithms.speculative.heads.source import HeadSource, HeadWeights
from decodax.algorithms.speculative.source import Answer, Level
from decodax.algorithms.speculative.tree import Probes, Proposal, tree
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Feature
from decodax.core.checks import draft_weights
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings, logits_of
from decodax.core.window import Window, take
from decodax.models.drafters.head import DraftHead
from decodax.models.drafters.hidden_transfer import Transfer
from decodax.models.drafters.prompt_tokens import ProbesHead


@struct
class Prompted(Struct):
    """State of `PromptTokens`.

    Attributes:
        hidden: `f[B, K, E D]`, the target's hidden states of which the drafts of each depth are made, from an ensemble
            of E probes each: those at the probes after the last accepted token; zeros before the first round.
    """

    hidden: Array


@dataclasses.dataclass(frozen=True)
class PromptTokens(HeadSource):
    """Drafts with the target's own predictions at trained probes: prompt tokens, or transferred hidden states.

    Attributes:
        head: the probes after each node.
        weights: their `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
    """

    __repr__ = short

    head: ProbesHead
    takes: ClassVar[tuple[type[DraftHead], str]] = ProbesHead, "trained probes"
    proposes: ClassVar[frozenset[Form]] = frozenset(("probes",))
    cache_needs: ClassVar[frozenset[Feature]] = TREES

    @property
    def longest(self) -> int:
        return self.head.longest

    def init(self, params: Params, s: State) -> Prompted:
        draft_weights(params.draft, self.head, HeadWeights)
        one = jax.eval_shape(lambda params: embeddings(self.model, params.target, jnp.zeros((1, 1), jnp.int32)), params)
        return Prompted(hidden=jnp.zeros((s.batch, self.longest, self.head.ensemble * one.shape[-1]), one.dtype))

    def start(self, params: Params, s: State, state: Prompted, room: int) -> tuple[Prompted, Answer]:
        hidden = state.hidden[:, :1]
        return state, Answer(self._logits(params, hidden), hidden)

    def extend(self, params: Params, s: State, state: Prompted, level: Level) -> tuple[Prompted, Answer]:
        return state, answer_by_depth(state.hidden, s, level, functools.partial(self._logits, params))

    def probes(self, params: Params, s: State, state: Prompted, proposal: Proposal) -> Probes | None:
        t, n = tree(s.newest, proposal, self.head.heads), self.head.heads * self.head.ensemble
        node, probe = np.divmod(np.arange(t.size * n), n)
        index, member = np.divmod(probe, self.head.ensemble)
        own = (node[:, None] == node) & (member[:, None] == member) & (index <= index[:, None])
        above = jnp.asarray(t.sees)[:, node]
        sees = jnp.concatenate([above, jnp.broadcast_to(own, (above.shape[0], *own.shape))], 2)
        vectors, transfer = self.head.inputs(params.draft.head, jnp.arange(t.size, dtype=jnp.int32)[None])
        return Probes(tokens=jnp.zeros((s.batch, len(node)), jnp.int32), sees=sees,
                      offset=jnp.asarray(t.depth)[:, node] + 1 + index.astype(np.int32),
                      embeddings=None if vectors is None else vectors[probe][None], transfer=transfer)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Prompted) -> Prompted:
        if decision is None or (window.embedded is None and window.hint(Transfer) is None):
            return state                    # of a window that another drafter has proposed
        n = self.head.heads * self.head.ensemble
        last = jnp.maximum(decision.count - 1, 0)[:, None]
        node = jnp.maximum(jnp.take_along_axis(decision.source, last, 1), 0)
        found = take(out.hidden, window.width // (1 + n) + node * n + jnp.arange(n, dtype=jnp.int32))
        return Prompted(hidden=jnp.where((decision.count > 0)[:, None, None], found.reshape(state.hidden.shape),
                                         state.hidden))

    def _logits(self, params: Params, hidden: Array) -> Array:
        B, W, E = *hidden.shape[:2], self.head.ensemble
        logits = logits_of(self.model, params.target, hidden.reshape(B, W * E, -1))
        return spread(logits if E == 1 else logits.reshape(B, W, E, -1).mean(2), None, self.vocab_size)
