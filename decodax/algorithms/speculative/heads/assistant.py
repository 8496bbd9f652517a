"""Drafts with an assistant of Gemma 4, whose layers attend to the target's cache (`decodax.models.drafters.assistant`).

A node's state is made of its token's embedding and the state of its parent, and none of the drafts is attended to, so
the nodes of a tree are as independent as those of a chain. As in transformers 5.24, all nodes have the position of the
newest token; some engines take the one before it. A layer with a sliding window sees the tokens that the target's own
layers would see from that position.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.drafts.self.self_draft import whole_text
from decodax.algorithms.speculative.heads.cross_kv import ReadsTargetKeys, attention_to
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead, trained
from decodax.algorithms.speculative.source import Answer, Level
from decodax.common.struct import Struct, short, struct
from decodax.core.checks import draft_weights
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings
from decodax.core.window import Window, take
from decodax.models.drafters.assistant import AssistantHead
from decodax.models.drafters.head import DraftHead, HeadStep


@struct
class Assisting(Struct):
    """State of an assistant.

    Attributes:
        feature: `f[B, D]`, the target's hidden state that predicted the newest token.
        states: within a round, `f[B, 1 + room, D]`, the states of the newest token and of the expanded nodes.
    """

    feature: Array
    states: Array | None = None


@dataclasses.dataclass(frozen=True)
class AssistantDraft(ReadsTargetKeys):
    """Drafts with an assistant.

    Attributes:
        head: the assistant's network, an `AssistantHead`.
        weights: its `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
    """

    __repr__ = short

    head: AssistantHead
    takes: ClassVar[tuple[type[DraftHead], str]] = AssistantHead, "an assistant"

    def init(self, params: Params, s: State) -> Assisting:      # type: ignore[override]
        draft_weights(params.draft, self.head, HeadWeights)
        return Assisting(feature=jnp.zeros((s.batch, self.head.backbone), self._dtype(params)))

    def start(self, params: Params, s: State, state: Assisting, room: int) -> tuple[Assisting, Answer]:   # type: ignore[override]
        step = self._run(params, s, s.newest[:, None], state.feature[:, None])
        states = jnp.pad(step.state, ((0, 0), (0, room), (0, 0)))
        return state.replace(states=states), Answer(self._logits(params, step.hidden, 0), step.hidden)

    def extend(self, params: Params, s: State, state: Assisting, level: Level) -> tuple[Assisting, Answer]:   # type: ignore[override]
        assert state.states is not None
        if level.chained and level.tokens.shape[1] > 1:
            self.check_chained()
        step = self._run(params, s, level.tokens, take(state.states, level.parents))
        states = lax.dynamic_update_slice_in_dim(state.states, step.state, level.at + 1, 1)
        return state.replace(states=states), Answer(self._logits(params, step.hidden, 0), step.hidden)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,    # type: ignore[override]
                state: Assisting) -> Assisting:
        features, _, live = self._pairs(params, s, window, out, decision)
        last = jnp.max(jnp.where(live, jnp.arange(live.shape[1], dtype=jnp.int32), -1), 1)
        newest = take(features, jnp.maximum(last, 0)[:, None])[:, 0].astype(state.feature.dtype)
        return Assisting(feature=jnp.where(last[:, None] >= 0, newest, state.feature))

    def _run(self, params: Params, s: State, tokens: Array, state: Array) -> HeadStep:
        """Runs the head on nodes with the tokens `i32[B, w]` and the states of their parents, `f[B, w, D]`."""
        config = self.model.config
        layers, cache = self.head.reads(config), whole_text(s)
        positions = jnp.broadcast_to(s.length[:, None] - 1, tokens.shape)
        embedded = embeddings(self.model, params.target, tokens)
        window = Window(tokens=tokens, positions=positions, mask=jnp.zeros((1, *tokens.shape[1:] * 2), bool),
                        live=jnp.ones(tokens.shape, bool))

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
            theirs, at = config.layers[layers[layer]], config.entries.index((layers[layer], False))
            return attention_to(cache, at, q, window, config.kv_shape(theirs), embedded.dtype, **options), ()

        return self.head.step(params.draft.head, tokens, lambda _: embedded, state, positions, 0, attend)


def next_tokens(lm: Any, draft: Any, *systems: str) -> TrainedHead:
    """Returns the drafting source of a target from a trained drafter that predicts further tokens: multi-token
    prediction layers, or an assistant model that attends to the target's cache.

    Args:
        lm: the target, a result of `decodax.load`.
        draft: a `TrainedDrafter` or the path of one; None: the one that is shipped for the target or in its files.
        systems: names of the methods for which it may have been trained, the most likely first.
    """
    made = trained(lm, draft, *systems)
    if not isinstance(made.head, AssistantHead):
        return made
    return AssistantDraft(made.head, made.weights).for_target(lm)


__all__ = ["AssistantDraft", "next_tokens"]
