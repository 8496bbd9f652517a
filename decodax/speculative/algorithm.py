"""Speculative decoding: a draft proposes, one target forward scores all of it, a verifier says what holds.

Leviathan, Kalman, Matias (2023) and Chen et al. (2023), with any source of drafts and any verification rule. The
window is the newest token followed by a chain of drafts; rows accept different lengths, which costs nothing: what was
not accepted was never written.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from decodax.cache import Window, causal
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.speculative.verify import SeedExact, Verifier
from decodax.struct import Struct, struct


@struct
class Proposal(Struct):
    """A chain of drafts.

    Attributes:
        tokens: `i32[B, K]`. count: `i32[B]`, how many of them are real; the rest is never accepted.
        log_q: `f32[B, K, V]` log of the distribution that each token *was drawn from*; None says that the drafts are
            deterministic, that is, drawn from a point mass.
    """

    tokens: Array
    count: Array
    log_q: Array | None = None


class Draft(Protocol):
    """A source of drafts: a frozen dataclass, static under jit."""

    @property
    def length(self) -> int:
        """`K`, the most drafts of a round."""

    def init(self, params: Params, s: State) -> Any:
        """Its state for a prompt."""

    def propose(self, params: Params, policy: Any, s: State, state: Any) -> tuple[Proposal, Any]:
        """What may follow each row's newest token."""

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        """Learns from a scored window and what was decided of it (None: a prefill chunk)."""


@dataclasses.dataclass(frozen=True)
class Speculative:
    """Decoding with drafts from `draft`, accepted by `verify`.

    The guarantee is the verifier's: `SeedExact`, the default, gives the tokens of plain sampling with the same seed.
    """

    draft: Draft
    verify: Verifier = SeedExact()
    caches = True

    @property
    def emits(self) -> int:
        return self.draft.length + 1

    def init(self, params: Params, s: State) -> Any:
        return self.draft.init(params, s), None

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        proposal, state = self.draft.propose(params, policy, s, s.algo[0])
        K = self.draft.length
        real = jnp.arange(K) < proposal.count[:, None]
        tokens = jnp.concatenate([s.newest[:, None], jnp.where(real, proposal.tokens, 0)], 1)
        live = jnp.concatenate([jnp.ones((s.batch, 1), bool), real], 1) & s.running[:, None]
        return causal(tokens, s.length - 1, live), (state, proposal)

    def decide(self, policy: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        state, proposal = algo
        tokens, accepted = self.verify(policy, s, proposal)
        node = jnp.broadcast_to(jnp.arange(window.width, dtype=jnp.int32), window.tokens.shape)
        # the newest token and the accepted drafts are true; the token that follows them opens the next window
        slots = jnp.where((node <= accepted[:, None]) & (tokens[:, :1] >= 0), window.positions, -1)
        d = Decision(tokens=tokens, count=accepted + 1, slots=slots, source=node, algo=None, drafted=proposal.count,
                     accepted=accepted)
        return d.replace(algo=(self.draft.observe(s, window, out, d, state), None))

    def observe(self, s: State, window: Window, out: Out, algo: Any) -> Any:
        return self.draft.observe(s, window, out, None, algo[0]), None
