"""Drafts that combine other parts: a `Source` with a `Shape`, and the first drafts of another draft's chains."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax.algorithms.speculative.contracts import grow, propose
from decodax.algorithms.speculative.drafter import CHAINS, TREES, AroundSource, Form
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Draft, Grower, Shape, Source, fitted
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Params


@dataclasses.dataclass(frozen=True)
class Grown(AroundSource, Draft):
    """A draft that grows the trees of a `Source` by the rule of a `Shape`.

    Attributes:
        source: gives the distributions at the nodes.
        shape: grows the tree; None: the source's own shape, or a chain.
    """

    source: Source
    shape: Shape | None = None

    def __post_init__(self) -> None:
        longest = self.source.longest
        if longest is not None and self.form.length > longest:
            raise ValueError(f"length: got {self.form.length} drafts on a path, {type(self.source).__name__} takes at "
                             f"most {longest}")

    @property
    def form(self) -> Shape:
        return self.shape or self.source.shape or Chain()

    @property
    def length(self) -> int:
        return self.form.length

    @property
    def cache_needs(self) -> frozenset[Feature]:       # type: ignore[override]
        return self.source.cache_needs | (TREES if self.form.branches else CHAINS)

    @property
    def proposes(self) -> frozenset[Form]:      # type: ignore[override]
        form: frozenset[Form] = frozenset(("trees", "draws") if self.form.branches else ("draws",))
        return self.source.proposes | form

    @property
    def least_nodes(self) -> int:
        return self.form.least_nodes

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        self.form.check_source(self.source)

    def check_drawn(self, drawn: Drawn) -> None:
        self.source.check_drawn(drawn)
        self.form.check_drawn(drawn)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        source = fitted(self.source, policy.vocab_size)
        proposal, state, nodes = grow(self.form, Grower(source, params, policy, s, drawn), state)
        begun = self.source.begin(params, s, state, proposal, nodes)
        probes = self.source.probes(params, s, state, proposal)
        return proposal.replace(begun=begun, probes=probes), self.source.place(state, nodes)


@dataclasses.dataclass(frozen=True)
class Trimmed(AroundSource, Draft):
    """A draft that proposes the first `length` tokens of the chains of another draft, `source`, and drops the rest."""

    source: Draft
    length: int

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        self._check(not self.source.proposes & {"trees", "probes"})

    def _check(self, chain: bool) -> None:
        if not chain:
            raise ValueError(f"shape: {type(self.source).__name__} proposes trees or probes, which a chain cannot cut")

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        p, state = propose(self.source, params, policy, s, state, drawn)
        self._check(p.parents is None and p.probes is None)
        log_q = None if p.log_q is None else p.log_q[:, :self.length]
        tokens, live = p.tokens[:, :self.length], p.live[:, :self.length]
        return Proposal(tokens=tokens, live=live, log_q=log_q, match=p.match), state
