"""Drafts with a head that reads the target's keys and values (`decodax.models.drafters.cross_kv`).

The newest token and the drafts attend to the target's own cache of the verified text, through its `attend`, whatever
the cache keeps of the text. None of them is in that cache yet, so the drafts of one depth see keys that are equally
old. The head's cache has the keys and values of its self-attention, which depend on the verified tokens alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import TREES
from decodax.algorithms.speculative.drafts.model.draft_model import Drafting
from decodax.algorithms.speculative.drafts.self.self_draft import whole_text
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.algorithms.speculative.source import Answer, Level
from decodax.cache import AttentionView
from decodax.cache.entry import KVEntry
from decodax.common.axes import constrain
from decodax.common.struct import short, struct
from decodax.core.cache import Cache, Feature
from decodax.core.capabilities import tree_buffer
from decodax.core.checks import draft_weights
from decodax.core.mesh import heads
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings
from decodax.core.window import Window, causal
from decodax.models.drafters.assistant import AssistantHead
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.head import DraftHead, HeadStep
from decodax.models.transformer import Transformer


@struct
class CrossState(Drafting):
    """State of `CrossKVDraft`: the fields of `Drafting`, and one more.

    Attributes:
        skipped: `i32[B]`, number of tokens of the text that the head has not read. The positions of its self-attention
            leave them out; those of its attention to the target's cache do not.
    """

    skipped: Array = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class ReadsTargetKeys(TrainedHead):
    """Base class of sources whose trained head attends to the keys and values in the target's cache instead of its
    own."""

    head: AssistantHead | CrossKVHead
    cache_needs: ClassVar[frozenset[Feature]] = TREES       # drafts attend to the cache without their own keys

    def for_target(self, model: Any) -> Self:
        new = super().for_target(model)
        if not isinstance(new.model, Transformer):
            raise ValueError(f"model: got {type(new.model).__name__}, takes a Transformer, whose layers have keys and "
                             "values that the head reads")
        self.head.check_target(new.model.config)
        return new


@dataclasses.dataclass(frozen=True)
class CrossKVDraft(ReadsTargetKeys):
    """Drafts with a head that attends to the target's cache.

    Attributes:
        head: the head's network, a `CrossKVHead`.
        weights: its `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
    """

    __repr__ = short

    head: CrossKVHead
    takes: ClassVar[tuple[type[DraftHead], str]] = CrossKVHead, "one with a CrossKVHead"

    def init(self, params: Params, s: State) -> CrossState:      # type: ignore[override]
        draft_weights(params.draft, self.head, HeadWeights)
        cache = self.head.init_cache(s.batch, s.cache.capacity, self._dtype(params))
        return CrossState(cache=constrain(cache, heads(cache)), skipped=jnp.zeros(s.batch, jnp.int32))

    def unread(self, params: Params, batch: int) -> tuple[Any, Any]:
        return jnp.zeros((batch, 1, 0), jnp.float32), None          # only the tokens

    def start(self, params: Params, s: State, state: CrossState, room: int) -> tuple[CrossState, Answer]:     # type: ignore[override]
        state = self._begun(s, state)
        window = causal(s.newest[:, None], s.length - 1)
        step = self._run(params, s, window, state, state.cache)
        buffer = tree_buffer(state.cache, step.entries, 1 + room)
        buffer = buffer.append(step.entries, self._own(window.positions, state), jnp.zeros((), jnp.int32))
        return (state.replace(buffer=buffer.replace(base=None), nodes=None),
                Answer(self._logits(params, step.hidden, 0), step.hidden))

    def extend(self, params: Params, s: State, state: CrossState, level: Level) -> tuple[CrossState, Answer]:     # type: ignore[override]
        assert state.buffer is not None
        window = Window(tokens=level.tokens, positions=level.positions, mask=level.inside,
                        live=jnp.ones(level.tokens.shape, bool))
        sees = jnp.pad(level.sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)  # all are below the newest token
        step = self._run(params, s, window, state, state.buffer.replace(base=state.cache).seen_by(sees))
        buffer = state.buffer.append(step.entries, self._own(level.positions, state), level.at + 1)
        return state.replace(buffer=buffer), Answer(self._logits(params, step.hidden, 0), step.hidden)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,    # type: ignore[override]
                state: CrossState) -> CrossState:
        tokens, positions, live = window.tokens, window.positions, window.live
        if decision is not None:        # the newest token and the accepted drafts; the next token opens the next tree
            tokens = jnp.maximum(jnp.concatenate([s.newest[:, None], decision.tokens[:, :-1]], 1), 0)
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = s.length[:, None] - 1 + index
            live = (index < decision.count[:, None]) & (decision.tokens >= 0) & s.running[:, None]
        state = CrossState(cache=state.cache, skipped=self._skipped(state, positions, live, decision is None))
        positions = self._own(positions, state)
        entries = self._entries(params, tokens, positions, out, None if decision is None else decision.source)
        return state.replace(cache=state.cache.commit(entries, jnp.where(live, positions, -1)))

    def _own(self, positions: Array, state: CrossState) -> Array:
        """Returns the positions, `i32[B, W]`, in the head's own cache, of tokens at `positions` of the text."""
        return positions - state.skipped[:, None]

    def _entries(self, params: Params, tokens: Array, positions: Array, out: Out,
                 source: Array | None) -> tuple[Any, ...]:
        """Returns the entries of the head's cache for verified tokens, which are the nodes `source` (`i32[B, W]`) of
        the target's window; None: all of them."""
        embedded = embeddings(self.model, params.target, tokens).astype(self._dtype(params))
        return KVEntry(*self.head.keys_values(params.draft.head, embedded, positions)),

    def _known(self, s: State, cache: Cache) -> tuple[Any, int]:
        """Returns the cache that the cross-attention reads, and the layer in it. `cache` is the head's."""
        return whole_text(s), self.model.config.entries.index((self.head.layer, False))

    def _run(self, params: Params, s: State, window: Window, state: CrossState, own: Any) -> HeadStep:
        """Runs the head on tokens. `own` is its cache, or that with the buffer of earlier nodes."""
        (known, at), kv = self._known(s, state.cache), self.head.kv_layers[0]
        mine = window.replace(positions=self._own(window.positions, state))
        embedded = embeddings(self.model, params.target, window.tokens)

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
            if k is not None:
                return own.attend(layer, q, k, v, mine, **options)
            return attention_to(known, at, q, window, (kv.heads, kv.width), embedded.dtype, **options), ()

        return self.head.step(params.draft.head, window.tokens, lambda _: embedded,
                              jnp.zeros((), self._dtype(params)), window.positions, 0, attend,
                              own_positions=mine.positions)


def attention_to(cache: Any, layer: int, q: Array, window: Window, shape: tuple[int, int], dtype: Any,
                 **options: Any) -> Array:
    """Returns the attention of the queries `f[B, W, H, d]` of a window's nodes to a layer of a cache, without the nodes
    themselves.

    Args:
        cache: the cache.
        layer: the layer, counted as in the cache.
        q: the queries.
        window: the nodes.
        shape: number of the layer's key/value heads, and their width.
        dtype: that of the model whose cache it is.
        options: those of `Cache.attend`.
    """
    alone = AttentionView(positions=window.positions, key_positions=window.positions, tokens=window.tokens,
                          seen=jnp.zeros((*window.tokens.shape, window.width), bool))
    # No query attends to these keys, which a cache expects; with an empty cache the result is their value, 0.
    none = jnp.zeros((*window.tokens.shape, *shape), dtype)
    return cache.attend(layer, q.astype(dtype), none, none, alone, **options)[0].astype(q.dtype)


__all__ = ["CrossKVDraft", "CrossState", "ReadsTargetKeys", "attention_to"]
