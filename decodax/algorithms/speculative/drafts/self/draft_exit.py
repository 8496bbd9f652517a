"""The adaptive draft exit of Draft & Verify (Zhang et al., 2023): drafting ends at an uncertain token, with a threshold
that adapts to the acceptance rate.

A chain ends after the first draft whose probability is below `gamma`, and after each round

    AR    <- beta1 AR + (1 - beta1) accepted / drafted
    gamma <- beta2 gamma + (1 - beta2) gamma'

where gamma' is gamma + epsilon if AR is below the target rate alpha, gamma if the round had the largest number of
drafts, and otherwise gamma - epsilon. Each row has its own threshold. As in `ConfidenceChain`, the uncertain token
itself is verified and only the tokens after it are not drafted, so every verifier keeps its guarantee.
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
    """State of `DraftExit`.

    Attributes:
        gamma: `f32[B]`, the threshold.
        rate: `f32[B]`, the acceptance rate AR.
        mine: `bool[B]`, True if the window of this round has its own drafts.
        source: the source's state.
    """

    gamma: Array
    rate: Array
    mine: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class DraftExit(SourceAround):
    """Drafts chains of another source that end at a token below a probability threshold, which adapts to the acceptance
    rate (Draft & Verify: Zhang et al., 2023). The defaults are those of the authors' code.

    Attributes:
        source: a `Source`, in the paper `LayerSkip`.
        length: largest number of drafts.
        gamma: first threshold.
        alpha: target acceptance rate.
        epsilon: step of the threshold.
        beta1: weight of the old acceptance rate.
        beta2: weight of the old threshold.

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
        """The shape that is used if the user gives none: a chain of at most `length` drafts that ends after an unlikely
        draft."""
        return DoubtfulEnd(self.length)

    def init(self, params: Params, s: State) -> Exit:
        full = lambda x: jnp.full(s.batch, x, jnp.float32)
        return Exit(full(self.gamma), full(0), jnp.zeros(s.batch, bool), self.source.init(params, s))

    def start(self, params: Params, s: State, state: Exit, room: int) -> tuple[Exit, Answer]:
        source, answer = self.source.start(params, s, state.source, room)
        return state.replace(source=source, mine=s.running), answer

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Exit) -> Exit:
        state = state.replace(source=self.source.observe(params, s, window, out, decision, state.source))
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
    """A chain of at most `length` drafts. A row stops drafting after a draft to which the draft network gives a
    probability below the row's adaptive threshold, `gamma` (`f32[B]`) in the state of `DraftExit`."""

    length: int
    branches = False

    def grow(self, grower: Grower, state: Exit) -> tuple[Proposal, Any, Array]:
        return grow_chain(grower, state, self.length, chances(probability), lambda f, all_of_them: f >= state.gamma)
