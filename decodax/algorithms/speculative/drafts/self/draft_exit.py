"""The adaptive draft exit of Draft & Verify (Zhang et al., 2023): drafting ends at a doubtful token, by a threshold
that follows the acceptance rate.

A chain ends after the first draft whose probability is
below `gamma`, and after each round

    AR    <- beta1 AR + (1 - beta1) accepted / drafted
    gamma <- beta2 gamma + (1 - beta2) gamma'

where gamma' is gamma + epsilon while AR is below the aim alpha, gamma as it is after a round that drafted all it may,
and gamma - epsilon else. Each row has a threshold of its own. As in `ConfidenceChain` the doubtful token is verified
and only what would follow it is not drafted, so every verifier keeps its guarantee.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.source import Answer, Draft, Grower, Shape, Source, SourceAround
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import chances, check_chance, grow_chain, probability
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@struct
class Exit(Struct):
    """The state of `DraftExit`.

    Attributes:
        gamma: `f32[B]` the threshold. rate: `f32[B]` AR. mine: `bool[B]` True if its own drafts are in the window.
        source: the source's state.
    """

    gamma: Array
    rate: Array
    mine: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class DraftExit(SourceAround):
    """Drafts chains of another source that end at a token less likely than a threshold, which follows the acceptance.

    Attributes:
        source: a `Source`, `LayerSkip` in the paper. length: the most drafts.
        gamma: first threshold. alpha: acceptance rate that is aimed at. epsilon: step of the threshold.
        beta1, beta2: weights of the old acceptance rate and of the old threshold. Defaults of the authors' code.

    Raises:
        ValueError: a number out of range, or a draft that makes its own trees.
    """

    source: Source
    length: int = 8
    gamma: float = 0.8
    alpha: float = 0.9
    epsilon: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9

    def __post_init__(self) -> None:
        at_least(length=self.length)
        for name in ("gamma", "alpha", "epsilon", "beta1", "beta2"):
            check_chance(name, getattr(self, name))
        if isinstance(self.source, Draft):
            raise ValueError(f"source: {type(self.source).__name__} makes its own trees, takes a Source")

    @property
    def shape(self) -> DoubtfulEnd:
        """The shape of its chain unless another one is asked for."""
        return DoubtfulEnd(self.length)

    def init(self, params: Params, s: State) -> Exit:
        full = lambda x: jnp.full(s.batch, x, jnp.float32)
        return Exit(full(self.gamma), full(0), jnp.zeros(s.batch, bool), self.source.init(params, s))

    def start(self, params: Params, s: State, state: Exit, room: int) -> tuple[Exit, Answer]:
        source, answer = self.source.start(params, s, state.source, room)
        return state.replace(source=source, mine=s.running), answer

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Exit) -> Exit:
        state = state.replace(source=self.source.observe(s, window, out, decision, state.source))
        if decision is None:
            return state
        assert decision.accepted is not None and decision.drafted is not None
        rate = decision.accepted / jnp.maximum(decision.drafted, 1)
        rate = self.beta1 * state.rate + (1 - self.beta1) * rate
        step = jnp.where(rate < self.alpha, self.epsilon,
                         jnp.where(decision.drafted >= self.length, 0.0, -self.epsilon))
        gamma = state.gamma + (1 - self.beta2) * step
        told = state.mine & (decision.drafted > 0)
        return state.replace(gamma=jnp.where(told, gamma, state.gamma), rate=jnp.where(told, rate, state.rate),
                             mine=jnp.zeros_like(state.mine))


@dataclasses.dataclass(frozen=True)
class DoubtfulEnd(Shape):
    """A chain of at most `length` that ends after a draft less likely than the source's `gamma`."""

    length: int

    def grow(self, grower: Grower, state: Exit) -> tuple[Proposal, Any, Array]:
        return grow_chain(grower, state, self.length, chances(probability), lambda f, all_of_them: f >= state.gamma)
