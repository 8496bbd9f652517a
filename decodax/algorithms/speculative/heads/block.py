"""Drafts with a block head: one pass over the newest token and masks gives the distributions of all next tokens.

The head's cache has the context features of verified tokens, as keys and values (`decodax.models.drafters.block`); the
block's own are never stored. After the pass, a node of the tree only looks up the logits of its depth. If the head has
a correction, that is computed for each node, from the node's token and the memory of its parent.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.by_depth import spread
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.algorithms.speculative.source import Answer, Level, Shape
from decodax.common.axes import constrain
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.checks import draft_weights
from decodax.core.mesh import heads
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings, logits_of
from decodax.core.window import Window, bidirectional, causal, take
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.head import DraftHead


@struct
class BlockState(Struct):
    """State of a block head. The fields after `skipped` are those of a round.

    Attributes:
        cache: keys and values of the context features of verified tokens.
        skipped: `i32[B]`, number of tokens of the text that the head has not read. Its own positions leave them out.
        hidden: `f[B, K, d]`, hidden states of the slots that predict.
        logits: `f32[B, K, Vd]`, their logits before the correction.
        seen: `f[B, K, e]`, what the correction reads of them.
        memory: `f[B, 1 + room, m]`, the correction's memory before the newest token and each expanded node.
    """

    cache: Cache
    skipped: Array
    hidden: Array | None = None
    logits: Array | None = None
    seen: Array | None = None
    memory: Array | None = None


@dataclasses.dataclass(frozen=True)
class BlockDraft(TrainedHead):
    """Drafts with a block head, in one pass for all tokens.

    A path has at most `head.longest` drafts; nodes beyond it get the logits of the last slot. For a shorter tree the
    block has fewer masks, so its drafts cost less. Slots that see each other then predict without the masks after
    them, which the head was not trained for: models trained with large blocks draft well with smaller ones (Chen, Liang
    and Liu, 2026).

    Attributes:
        head: the head's network, a `BlockHead`.
        weights: its `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
    """

    __repr__ = short

    head: BlockHead
    takes: ClassVar[tuple[type[DraftHead], str]] = BlockHead, "one with a block head"

    @property
    def shape(self) -> Shape:
        return Chain(self.head.longest)

    def within(self, length: int | None) -> int:
        """Returns `length`, checked against the number of tokens that the head predicts; that number if `length` is
        None.

        Raises:
            ValueError: the head predicts fewer.
        """
        if length is not None and length > self.head.longest:
            raise ValueError(f"length: got {length}, the head predicts {self.head.longest} tokens")
        return length or self.head.longest

    def check_chained(self) -> None:
        if self.head.memory:
            raise ValueError(f"draft: {type(self.head.correction).__name__} computes its memory at a node from that at "
                             "its parent, so it does not take a chain of several nodes at once")

    def init(self, params: Params, s: State) -> BlockState:      # type: ignore[override]
        draft_weights(params.draft, self.head, HeadWeights)
        cache = self.head.init_cache(s.batch, s.cache.capacity, self._dtype(params))
        assert cache is not None
        return BlockState(cache=constrain(cache, heads(cache)), skipped=jnp.zeros(s.batch, jnp.int32))

    def start(self, params: Params, s: State, state: BlockState, room: int) -> tuple[BlockState, Answer]:  # type: ignore[override]
        h, weights = self.head, params.draft.head
        state = self._begun(s, state)
        drafts = slice(h.offset, h.offset + min(h.longest, room + 1))
        tokens = jnp.full((s.batch, drafts.stop), h.mask or 0, jnp.int32).at[:, 0].set(s.newest)
        window = (causal if h.causal else bidirectional)(tokens, s.length - 1 - state.skipped)
        step = h.step(weights, tokens, self._embed(params), jnp.zeros((), self._dtype(params)), window.positions, 0,
                      self._attend(state.cache, window))
        seen = h.prepare(weights, step.hidden)
        before = jnp.take_along_axis(s.tokens, jnp.maximum(s.length - 2, 0)[:, None], 1)[:, 0]
        memory = h.opening(weights, seen, s.newest, before, self._embed(params))
        hidden = step.hidden[:, drafts]
        logits = h.logits(weights, hidden, 0, lambda x: logits_of(self.model, params.target, x))
        state = state.replace(hidden=hidden, logits=logits, seen=seen[:, drafts])
        memory, answer = self._answer(params, state, s.newest[:, None], jnp.zeros((s.batch, 1), jnp.int32), memory)
        return state.replace(memory=jnp.pad(memory, ((0, 0), (0, room), (0, 0)))), answer

    def extend(self, params: Params, s: State, state: BlockState, level: Level) -> tuple[BlockState, Answer]:  # type: ignore[override]
        assert state.memory is not None
        if level.chained and level.tokens.shape[1] > 1:
            self.check_chained()
        depth = level.positions - s.length[:, None] + 1
        memory, answer = self._answer(params, state, level.tokens, depth, take(state.memory, level.parents))
        return state.replace(memory=lax.dynamic_update_slice_in_dim(state.memory, memory, level.at + 1, 1)), answer

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,    # type: ignore[override]
                state: BlockState) -> BlockState:
        features = self.head.features(out.hidden, out.states)
        if decision is None:                # a chunk of the prompt
            positions, live = window.positions, window.live
        else:                               # the newest token and the accepted drafts, whose features are known now
            features, tokens = take(features, decision.source), decision.tokens
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = s.length[:, None] - 1 + index
            live = (index < decision.count[:, None]) & (tokens >= 0) & s.running[:, None]
        skipped = self._skipped(state, positions, live, decision is None)
        positions = positions - skipped[:, None]
        entered = self.head.enter(params.draft.head, features.astype(self._dtype(params)))
        entries = self.head.context(params.draft.head, entered, positions)
        # the slots depend on the features, or XLA on CPU copies the cache to protect its readers
        kept = live & jnp.isfinite(entered).all(-1)
        return BlockState(cache=state.cache.commit(entries, jnp.where(kept, positions, -1)), skipped=skipped)

    def _answer(self, params: Params, state: BlockState, tokens: Array, depth: Array,
                memory: Array) -> tuple[Array, Answer]:
        """Returns the memory after nodes with the given tokens and depths, and the answer for them. `memory` is that of
        their parents."""
        h, weights = self.head, params.draft.head
        assert state.logits is not None and state.hidden is not None and state.seen is not None
        at = jnp.minimum(depth, state.logits.shape[1] - 1)
        hidden = take(state.hidden, at)
        logits, memory = h.correct(weights, take(state.logits, at), take(state.seen, at), tokens, self._embed(params),
                                   memory, at + h.offset)
        chance = h.chance(weights, hidden, tokens, at)
        logits = spread(logits, params.draft.ids, self.vocab_size)
        return memory, Answer(logits, hidden, None if chance is None else jax.nn.sigmoid(chance))

    def _embed(self, params: Params) -> Any:
        return lambda tokens: embeddings(self.model, params.target, tokens)

    def _attend(self, cache: Any, window: Window) -> Any:
        """Returns the attention of a block to the context and to itself."""
        h, slots = self.head, jnp.arange(cache.capacity, dtype=jnp.int32)

        def attend(layer: int, q: Array, k: Array, v: Array, *, sliding: int | None = None, **options: Any) -> Any:
            w = window
            if sliding is not None:
                if h.causal_sliding is not None:
                    full = jnp.ones((1, window.width, window.width), bool)
                    w = w.replace(mask=jnp.tril(full) if h.causal_sliding else full)
                if h.window_from == "newest":
                    w, sliding = w.replace(cached=slots >= window.positions[:, :1] - sliding), None
            return cache.attend(layer, q, k, v, w, sliding=sliding, **options)

        return attend


__all__ = ["BlockDraft", "BlockState"]
