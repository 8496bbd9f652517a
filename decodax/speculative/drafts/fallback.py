"""Two sources, chosen row by row and round by round: the second where the first has little to offer.

The rule of SAM-Decoding (Hu et al. 2024): what the text repeats is drafted from the text, by its suffix automaton or
any lookup, and what it does not by a draft model or table. `Adaptive` chooses for the batch, by cost; this chooses for
each row, and both sources run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache import Window
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.speculative.source import Drawn, Grown
from decodax.speculative.tree import Proposal


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Chains of `first` where they have at least `at_least` tokens, else those of `second`.

    Attributes:
        first: a `Draft` of deterministic chains. second: a `Draft` or `Source` of chains, grown by `shape`.

    Raises:
        ValueError: at_least below 1.
    """

    first: Any
    second: Any
    at_least: int = 2
    shape: Any = None

    def __post_init__(self) -> None:
        if self.at_least < 1:
            raise ValueError(f"at_least: got {self.at_least}, takes 1 or more")

    @property
    def other(self) -> Any:
        """The second as a `Draft`."""
        return self.second if hasattr(self.second, "propose") else Grown(self.second, self.shape)

    @property
    def length(self) -> int:
        return max(self.first.length, self.other.length)

    @property
    def weights(self) -> Any:
        return self.first.weights, self.second.weights

    def bare(self) -> Fallback:
        return dataclasses.replace(self, first=self.first.bare(), second=self.second.bare())

    def init(self, params: Params, s: State) -> Any:
        one, two = _split(params)
        return self.first.init(one, s), self.other.init(two, s)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        one, two = _split(params)
        a, first = self.first.propose(one, policy, s, state[0], drawn)
        b, second = self.other.propose(two, policy, s, state[1], drawn)
        for p, draft in ((a, self.first), (b, self.second)):
            if p.parents is not None or p.probes is not None:
                raise ValueError(f"Fallback takes chains, {type(draft).__name__} proposes trees or probes")
        mine = a.count >= self.at_least
        wide = lambda x, fill: jnp.pad(x, [(0, 0), (0, self.length - x.shape[1])] + [(0, 0)] * (x.ndim - 2),
                                       constant_values=fill)
        pick = lambda x, y, fill: jnp.where(mine.reshape(-1, *[1] * (x.ndim - 1)), wide(x, fill), wide(y, fill))
        tokens = pick(a.tokens, b.tokens, 0)
        log_q = None
        if a.log_q is not None or b.log_q is not None:
            V = (b.log_q if a.log_q is None else a.log_q).shape[-1]
            log_q = pick(_log_q(a, V), _log_q(b, V), 0)
        return Proposal(tokens=tokens, live=pick(a.live, b.live, False), log_q=log_q), (first, second)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return (self.first.observe(s, window, out, decision, state[0]),
                self.other.observe(s, window, out, decision, state[1]))


def _log_q(p: Proposal, vocabulary: int) -> Array:
    """What a chain was drawn from; a deterministic one from point masses."""
    if p.log_q is not None:
        return p.log_q
    return jnp.where(p.tokens[..., None] == jnp.arange(vocabulary), 0.0, -jnp.inf)


def _split(params: Params) -> tuple[Params, Params]:
    one, two = params.draft if params.draft is not None else (None, None)
    return params.replace(draft=one), params.replace(draft=two)
