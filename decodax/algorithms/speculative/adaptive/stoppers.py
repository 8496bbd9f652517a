"""Small networks that decide how many tokens are drafted: the acceptance head of SpecDec++ (Huang et al., 2024) and the
draft length predictor of AdaEAGLE (Zhang et al., 2024).

Each wraps a source and adds its prediction to the source's answers (`Answer.chance`); a shape that reads predictions,
such as `RiskThreshold`, then ends the chain.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.source import Answer, Level, Source, SourceAround
from decodax.algorithms.speculative.tree import Probes, Proposal
from decodax.common.struct import Struct, short, struct
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take

BLOCKS = 3
"""Number of residual blocks of an acceptance head, the authors'."""


@dataclasses.dataclass(frozen=True)
class AcceptanceHead(AroundSource, Source):
    """A source whose hidden states also give the probability that the token of a node is accepted.

    The head is the paper's: residual blocks `x + silu(W x + b)`, which share their weights in the authors' code, and a
    linear layer with two outputs, rejected and accepted.

    Attributes:
        source: the source, whose answers must have hidden states.
        head: its weights: "block" `f32[D, D]`, "block_bias" `f32[D]`, "out" `f32[D, 2]`, "out_bias"
            `f32[2]`.
    """

    __repr__ = short

    source: Source
    head: dict[str, Any] | None = data()

    @property
    def prefill_observer(self) -> Self | None:
        return None if self.source.prefill_observer is None else self

    @property
    def longest(self) -> int | None:
        return self.source.longest

    def init(self, params: Params, s: State) -> Any:
        return self.source.init(_inner(params), s)

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        state, answer = self.source.start(_inner(params), s, state, room)
        return state, answer.replace(chance=jnp.ones(answer.logits.shape[:2]))      # the newest token is a fact

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        state, answer = self.source.extend(_inner(params), s, state, level)
        if answer.hidden is None:
            raise ValueError(f"draft: {type(self.source).__name__} has no hidden states, which AcceptanceHead reads")
        return state, answer.replace(chance=accepted(params.draft[1], answer.hidden))

    def place(self, state: Any, slots: Array) -> Any:
        return self.source.place(state, slots)

    def begin(self, params: Params, s: State, state: Any, proposal: Proposal, slots: Array) -> Any:
        return self.source.begin(_inner(params), s, state, proposal, slots)

    def probes(self, params: Params, s: State, state: Any, proposal: Proposal) -> Probes | None:
        return self.source.probes(_inner(params), s, state, proposal)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.source.observe(_inner(params), s, window, out, decision, state)


def scores(head: Any, hidden: Array) -> Array:
    """Returns the head's logits of the two classes "rejected" and "accepted", `f32[..., 2]`, for a draft token, from
    the draft model's hidden states at it, `f[..., D]`. `head` are the head's weights."""
    x = hidden.astype(jnp.float32)
    for _ in range(BLOCKS):
        x = x + jax.nn.silu(x @ head["block"] + head["block_bias"])
    return x @ head["out"] + head["out_bias"]


def accepted(head: Any, hidden: Array) -> Array:
    """Returns the head's probability that a draft token is accepted, `f32[...]`, from the draft model's hidden states
    at it, `f[..., D]`."""
    logits = scores(head, hidden)
    return jax.nn.sigmoid(logits[..., 1] - logits[..., 0])


@struct
class LengthState(Struct):
    """State of `DraftLength`.

    Attributes:
        source: the source's state.
        feature: `f32[B, D]`, the target's hidden state from which the newest token was drawn.
        length: within a round, `i32[B]`, number of tokens to draft.
    """

    source: Any
    feature: Array
    length: Array


@dataclasses.dataclass(frozen=True)
class DraftLength(SourceAround):
    """A source that predicts before it drafts how many drafts will be accepted, from the target's newest hidden state.

    The predictor is a perceptron with three layers. Drafts up to the predicted number get the probability 1, and later
    ones 0.

    Attributes:
        source: the source.
        network: weights of the predictor: "first", "second", "third" with "first_bias" and so on, and "mean" and
            "scale" `f32[D]` of the hidden states.
    """

    __repr__ = short

    source: Source
    network: dict[str, Any] | None = data()

    @property
    def prefill_observer(self) -> Self:
        return self

    def init(self, params: Params, s: State) -> LengthState:
        width = params.draft[1]["mean"].shape[0]
        return LengthState(source=self.source.init(_inner(params), s), feature=jnp.zeros((s.batch, width)),
                           length=jnp.zeros(s.batch, jnp.int32))

    def start(self, params: Params, s: State, state: LengthState, room: int) -> tuple[LengthState, Answer]:
        source, answer = self.source.start(_inner(params), s, state.source, room)
        length = jnp.maximum(jnp.round(draft_length(params.draft[1], state.feature)), 1).astype(jnp.int32)
        return (state.replace(source=source, length=length),
                answer.replace(chance=(length > 1)[:, None].astype(jnp.float32)))

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        source, answer = self.source.extend(_inner(params), s, state.source, level)
        drafted = level.positions - s.length[:, None] + 2        # with the next one
        return state.replace(source=source), answer.replace(
            chance=(drafted < state.length[:, None]).astype(jnp.float32))

    def probes(self, params: Params, s: State, state: Any, proposal: Proposal) -> Probes | None:
        return self.source.probes(_inner(params), s, state.source, proposal)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: LengthState) -> LengthState:
        source = self.source.observe(_inner(params), s, window, out, decision, state.source)
        if decision is None:
            nodes, live = jnp.arange(window.live.shape[1])[None], window.live
        else:
            nodes = decision.source
            live = (jnp.arange(nodes.shape[1]) < decision.count[:, None]) & s.running[:, None]
        last = jnp.max(jnp.where(live, jnp.arange(live.shape[1]), -1), 1)
        at = jnp.take_along_axis(jnp.broadcast_to(nodes, live.shape), jnp.maximum(last, 0)[:, None], 1)
        seen = take(out.hidden, at)[:, 0].astype(jnp.float32)
        return state.replace(source=source, feature=jnp.where(last[:, None] >= 0, seen, state.feature))


def draft_length(network: Any, feature: Array) -> Array:
    """Returns the network's prediction of how many drafts will be accepted in a round, `f32[...]` (not rounded), from
    the target's hidden states before the round, `f32[..., D]`."""
    x = (feature - network["mean"]) / network["scale"]
    x = jax.nn.relu(x @ network["first"] + network["first_bias"])
    x = jax.nn.relu(x @ network["second"] + network["second_bias"])
    return (x @ network["third"] + network["third_bias"])[..., 0]


def _inner(params: Params) -> Params:
    """The parameters of the wrapped source, whose weights come first."""
    return params.replace(draft=params.draft[0])
