"""Drafts of the tokens that a constraint forces, such as the names of a JSON object, brackets, or the rest of a
choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.contracts import propose
from decodax.algorithms.speculative.drafter import CHAINS, Drafter
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.tree import Drawn, Proposal, chain
from decodax.constraints.transform import Constrained
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class Forced(Draft):
    """Drafts the tokens that a constraint forces. Rows in which no token is forced use another draft.

    The forward pass that scores the tokens would also have been made for the first of them alone, so the others are
    free. They are only drafts: if the forced text can be split into tokens in several ways, the model chooses.

    Attributes:
        length: largest number of tokens in a draft.
        base: the draft for rows without a forced token, with chains of at most `length`; None: no drafts there.
    """

    length: int = 8
    base: Draft | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")
        if self.base is not None and self.base.length > self.length:
            raise ValueError(f"base: drafts {self.base.length} tokens, takes at most {self.length}")

    @property
    def cache_needs(self) -> frozenset[Feature]:       # type: ignore[override]
        return CHAINS if self.base is None else self.base.cache_needs

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        self._check(self.base is None or not self.base.proposes & {"trees", "probes"})

    def check_drawn(self, drawn: Drawn) -> None:
        if self.base is not None:
            self.base.check_drawn(drawn)
            self._check(drawn in ("coupled", "ranked") or "draws" not in self.base.proposes)

    def _check(self, chain: bool) -> None:
        if not chain:
            raise ValueError(f"base: {type(self.base).__name__} drafts more than one chain, or draws it; takes one "
                             "that looks its chains up")

    @property
    def prefill_observer(self) -> Drafter | None:
        return None if self.base is None else self.base.prefill_observer

    def init(self, params: Params, s: State) -> Any:
        return None if self.base is None else self.base.init(params, s)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return state if self.base is None else self.base.observe(params, s, window, out, decision, state)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        tokens, count = forced(policy, s, self.length)
        if self.base is None:
            return chain(tokens, count), state
        proposal, state = propose(self.base, params, policy, s, state, drawn)
        self._check(proposal.parents is None and proposal.probes is None and proposal.log_q is None)
        more = self.length - proposal.tokens.shape[1]
        other = jnp.pad(proposal.tokens, ((0, 0), (0, more)))
        own = count > 0
        return chain(jnp.where(own[:, None], tokens, other), jnp.where(own, count, proposal.count)), state


def forced(policy: Any, s: State, length: int) -> tuple[Array, Array]:
    """Returns the tokens that follow in each row because the constraint allows only one token each, `i32[B, length]`,
    and the number of these, `i32[B]`, at most `length`; later entries are padding."""
    found, number = jnp.zeros((s.batch, length), jnp.int32), jnp.zeros(s.batch, jnp.int32)
    for link, state in zip(policy.transforms, s.policy, strict=True):
        if not isinstance(link, Constrained):
            continue
        table = policy.tables[link.place]

        def step(state: Array, _: Any, table: Any = table) -> tuple[Array, Array]:
            token = jnp.where(state < 0, -1, table.forced[jnp.maximum(state, 0)])
            return jnp.where(token < 0, -1, table.move(state, token)), token

        tokens = lax.scan(step, state, None, length)[1].T
        count = jnp.cumprod(tokens >= 0, 1).sum(1).astype(jnp.int32)
        found = jnp.where((count > 0)[:, None], jnp.maximum(tokens, 0), found)
        number = jnp.where(count > 0, count, number)
    return found, number
