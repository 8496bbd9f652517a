"""Combines two sources of drafts: a row uses the second one if the first has only a short match in the text.

This is the rule of SAM-Decoding (Hu et al. 2024). If a long suffix of the text has occurred before, its continuation is
drafted; otherwise another source drafts, such as Token Recycling's tree or a draft model. The length of the match
indicates how likely its continuation is. `Adaptive` chooses one draft for the batch, by cost; this class chooses for
each row, and both sources run.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.contracts import propose
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.grown import Grown
from decodax.algorithms.speculative.source import Draft, Shape, Source
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.common.struct import Struct, struct
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@struct
class Both(Struct):
    """State of `Fallback`.

    Attributes:
        first: state of the first draft.
        second: state of the second draft.
        mine: `bool[B]`, True for rows whose drafts in this round come from the first one.
    """

    first: Any
    second: Any
    mine: Array


@dataclasses.dataclass(frozen=True)
class Fallback(Draft):
    """Drafts with `first` in rows where its match has at least `at_least` tokens, and with `second` in the others.

    Attributes:
        first: a `Draft` of deterministic chains that returns the length of its matches: `SuffixAutomaton` or
            `PromptLookup`.
        second: a `Draft` or `Source` of chains or trees.
        at_least: smallest length of a match of the first source, in tokens.
        shape: shape of the tree, if the second one is a `Source`.

    Raises:
        ValueError: `at_least` is below 1; or, before it is traced, the first source returns no lengths of matches or
            makes trees, or the second one has probes.
    """

    first: Draft
    second: Draft | Source
    at_least: int = 5
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if self.at_least < 1:
            raise ValueError(f"at_least: got {self.at_least}, takes 1 or more")

    @property
    def other(self) -> Draft:
        """The field `second` as a `Draft`; a `Source` is combined with the shape of its trees."""
        return self.second if isinstance(self.second, Draft) else Grown(self.second, self.shape)

    @property
    def length(self) -> int:
        return max(self.first.length, self.other.length)

    @property
    def least_nodes(self) -> int:
        return max(self.first.least_nodes, self.other.least_nodes)

    if not TYPE_CHECKING:       # of class variables

        @property
        def proposes(self) -> frozenset[Form]:
            return self.other.proposes - {"matches"}

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return self.first.cache_needs | self.other.cache_needs

    def check_fit(self, model: Any, cache: Any) -> None:
        self.first.check_fit(model, cache)
        self.other.check_fit(model, cache)
        self._check("matches" in self.first.proposes and not self.first.proposes & {"trees", "probes", "draws"},
                    "probes" in self.other.proposes)

    def check_drawn(self, drawn: Drawn) -> None:
        self.other.check_drawn(drawn)

    def _check(self, matches: bool, probes: bool) -> None:
        if not matches:
            raise ValueError(f"first: got {type(self.first).__name__}, takes a Draft of deterministic chains that says "
                             "how long its matches are, SuffixAutomaton or PromptLookup")
        if probes:
            raise ValueError(f"second: got {type(self.second).__name__}, which proposes probes; takes chains and trees")

    def init(self, params: Params, s: State) -> Both:
        one, two = _split(params)
        return Both(self.first.init(one, s), self.other.init(two, s), jnp.zeros(s.batch, bool))

    def propose(self, params: Params, policy: Any, s: State, state: Both, drawn: Drawn) -> tuple[Proposal, Both]:
        one, two = _split(params)
        a, first = propose(self.first, one, policy, s, state.first, drawn)
        b, second = propose(self.other, two, policy, s, state.second, drawn)
        self._check(a.match is not None and a.parents is None and a.log_q is None, b.probes is not None)
        assert a.match is not None
        mine = a.match >= self.at_least
        N = max(a.tokens.shape[1], b.tokens.shape[1])
        wide = lambda x, size, fill: jnp.pad(x, [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2),
                                             constant_values=fill)
        pick = lambda x, y, size, fill: jnp.where(mine.reshape(-1, *[1] * (x.ndim - 1)), wide(x, size, fill),
                                                  wide(y, size, fill))
        parents = log_q = None
        if b.parents is not None:
            above = jnp.broadcast_to(b.parents, b.tokens.shape)
            parents = jnp.where(mine[:, None], jnp.arange(N, dtype=jnp.int32), wide(above, N, 0))
        if b.log_q is not None:
            certain = jnp.where(a.tokens[..., None] == jnp.arange(b.log_q.shape[-1]), 0.0, -jnp.inf)
            log_q = pick(certain, b.log_q, max(certain.shape[1], b.log_q.shape[1]), 0)
        proposal = Proposal(tokens=pick(a.tokens, b.tokens, N, 0), live=pick(a.live, b.live, N, False),
                            parents=parents, log_q=log_q)
        return proposal, Both(first, second, mine)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Both) -> Both:
        one, two = _split(params)
        first = self.first.observe(one, s, window, out, decision, state.first)
        if decision is not None:        # the window of such a row has other nodes than the second source's
            decision = decision.replace(slots=jnp.where(state.mine[:, None], -1, decision.slots))
        return Both(first, self.other.observe(two, s, window, out, decision, state.second), state.mine)


def _split(params: Params) -> tuple[Params, Params]:
    one, two = params.draft if params.draft is not None else (None, None)
    return params.replace(draft=one), params.replace(draft=two)
