"""Drafts with a trained head, which reads the hidden states that the target computes anyway.

A head works on pairs of a feature and the token after it (`decodax.models.drafters`). After a round the features of all
accepted tokens are known, and the head's state is computed from them: what it computed from its own predictions while
drafting is dropped. So the newest token, which the target has not processed yet, opens the next tree.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.by_depth import of_depths, spread
from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.common.arguments import shown
from decodax.common.axes import constrain
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.capabilities import Draftable, tree_buffer, truncate
from decodax.core.checks import draft_weights
from decodax.core.composed import data
from decodax.core.mesh import heads
from decodax.core.state import State
from decodax.core.target import RunsTarget
from decodax.core.types import Decision, Out, Params, embeddings, logits_of
from decodax.core.window import Window, causal, take
from decodax.io.drafters import TrainedDrafter, heads_beside, load_drafter, own_drafter, shipped_drafter
from decodax.models.drafters.head import Depth, DraftHead, HeadStep
from decodax.models.packed import Packed
from decodax.sampling.guidance import Guided


@struct
class HeadWeights(Struct):
    """The weights of a drafter.

    Attributes:
        head: those of its network.
        ids: `i32[Vd]`, the target's token for each of the head's logits; None: they are the target's. For units of
            several tokens `i32[U, L]`.
    """

    head: Any
    ids: Array | None = None


@struct
class HeadState(Struct):
    """State of a head.

    Attributes:
        cache: keys and values of verified pairs; None for a head without attention.
        hidden: `f[B, h]`, the head's hidden state for the newest token.
        state: `f[B, d]`, its state there.
        skipped: `i32[B]`, number of pairs of the text that the head has not read. Its own positions leave them out.
        states: within a round, `f[B, 1 + room, d]`, those of the newest token and of the expanded nodes.
        buffer: within a round, the buffer with the keys and values of the nodes, if they have any.
    """

    cache: Cache | None
    hidden: Array
    state: Array
    skipped: Array
    states: Array | None = None
    buffer: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class HeadSource(RunsTarget, Source):
    """Base class of sources with the weights of a trained drafter.

    Attributes:
        head: the drafter's network.
        weights: its `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
        takes: the class of `head`, and what a drafter with it is called in errors.
    """

    __repr__ = short

    head: DraftHead
    weights: Any = data()
    vocab_size: int | None = None
    takes: ClassVar[tuple[type[DraftHead], str]] = DraftHead, "a trained drafter"

    def for_target(self, model: Any) -> Self:
        return super().for_target(model.base if isinstance(model, Guided) else model)

    @classmethod
    def trained(cls, lm: Any, draft: Any, *systems: str) -> Self:
        """Returns the source of drafts for a target, from a trained drafter with a head of this class; the arguments
        are those of the function `trained`.

        Raises:
            ValueError: as in `trained`, or the drafter has another head.
        """
        made, (head, words) = trained(lm, draft, *systems), cls.takes
        if not isinstance(made.head, head):
            raise ValueError(f"draft: got one with a {type(made.head).__name__}, {systems[0]!r} takes {words}")
        return cls(made.head, made.weights).for_target(lm)

    def for_vocabulary(self, size: int) -> Self:
        """Returns the drafter for a target with `size` logits: `vocab_size` is set to it if it was None."""
        return self if self.vocab_size else dataclasses.replace(self, vocab_size=size)


@dataclasses.dataclass(frozen=True)
class TrainedHead(HeadSource):
    """Drafts with a trained head. The attributes are those of `HeadSource`."""

    __repr__ = short

    defers: ClassVar[bool] = True

    @property
    def prefill_observer(self) -> Self:
        return self

    @property
    def longest(self) -> int | None:
        return self.head.longest

    @property
    def takes_gaps(self) -> bool:
        return not self.head.carries_state

    def init(self, params: Params, s: State) -> HeadState:
        draft_weights(params.draft, self.head, HeadWeights)
        cache, dtype = None, self._dtype(params)
        if self.head.kv_layers:
            cache = self.head.init_cache(s.batch, s.cache.capacity, dtype)
            cache = constrain(cache, heads(cache))
        shapes = self._shapes(params, s.batch)
        zeros = lambda x: jnp.zeros((s.batch, x.shape[2]), x.dtype)
        return HeadState(cache=cache, hidden=zeros(shapes.hidden), state=zeros(shapes.state),
                         skipped=jnp.zeros(s.batch, jnp.int32))

    def unread(self, params: Params, batch: int) -> tuple[Any, Any]:
        dtype = jax.eval_shape(lambda weights: embeddings(self.model, weights, jnp.zeros((1, 1), jnp.int32)),
                               params.target).dtype
        one, taps = jnp.zeros((batch, 1, self.head.tap_width), dtype), self.head.taps
        if not taps:
            return one, None
        return one[:, :, :0], tuple(one if i in taps else None for i in range(max(taps) + 1))

    def start(self, params: Params, s: State, state: HeadState, room: int) -> tuple[HeadState, Answer]:
        buffer = None
        if state.cache is not None:
            state = self._begun(s, state)
            if self.head.drafts_attend:
                buffer = tree_buffer(state.cache, self._shapes(params, s.batch).entries, room).replace(base=None)
        states = jnp.pad(state.state[:, None], ((0, 0), (0, room), (0, 0)))
        hidden = state.hidden[:, None]
        return state.replace(states=states, buffer=buffer), Answer(self._logits(params, hidden, 0), hidden)

    def extend(self, params: Params, s: State, state: HeadState, level: Level) -> tuple[HeadState, Answer]:
        assert state.states is not None
        if level.chained and level.tokens.shape[1] > 1:
            self.check_chained()
        depth = level.positions - s.length[:, None] + 1
        window = Window(tokens=level.tokens, positions=level.positions - 1 - state.skipped[:, None], mask=level.inside,
                        live=jnp.ones(level.tokens.shape, bool))
        buffer = state.buffer
        seen = None if buffer is None else buffer.replace(base=state.cache).seen_by(level.sees)
        step = self._step(params, window, take(state.states, level.parents), depth, seen)
        if buffer is not None:
            assert seen is not None
            buffer = seen.append(step.entries, window.positions, level.at).replace(base=None)
        states = lax.dynamic_update_slice_in_dim(state.states, step.state, level.at + 1, 1)
        return (state.replace(states=states, buffer=buffer),
                Answer(self._logits(params, step.hidden, depth), step.hidden))

    def check_chained(self) -> None:
        raise ValueError(f"draft: {type(self.head).__name__} computes the state of a node from that of its parent, so "
                         "it does not take a chain of several nodes at once")

    def _pairs(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None
               ) -> tuple[Array, Window, Array]:
        """Returns the features of a window's verified tokens, the pairs of their positions with the tokens after them,
        and which of these count, `bool[B, W]`."""
        features, text = self.head.features(out.hidden, out.states), s.tokens
        if decision is None:                # a chunk of the prompt, whose tokens are all known
            at = jnp.minimum(window.positions + 1, s.tokens.shape[1] - 1)
            tokens, live = jnp.take_along_axis(s.tokens, at, 1), window.live
            pairs = window.replace(tokens=tokens)
        else:
            features = take(features, decision.source)
            tokens, index = decision.tokens, jnp.arange(decision.tokens.shape[1], dtype=jnp.int32)
            live = (index < decision.count[:, None]) & (tokens >= 0) & s.running[:, None]
            pairs = causal(jnp.maximum(tokens, 0), s.length - 1, live)
            if self.head.tokens_before:
                text = text.at[jnp.arange(s.batch)[:, None], pairs.positions + 1].set(pairs.tokens, mode="drop")
        if n := self.head.tokens_before:
            at = jnp.maximum(pairs.positions[..., None] + jnp.arange(1 - n, 1, dtype=jnp.int32), 0)
            read = embeddings(self.model, params.target, jnp.take_along_axis(text, at.reshape(s.batch, -1), 1))
            features = jnp.concatenate([features, read.reshape(*features.shape[:2], -1)], -1)
        return features, pairs, live

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: HeadState) -> HeadState:
        features, pairs, live = self._pairs(params, s, window, out, decision)
        last = jnp.max(jnp.where(live, jnp.arange(live.shape[1], dtype=jnp.int32), -1), 1)
        cache, found, newest = state.cache, last[:, None] >= 0, jnp.maximum(last, 0)[:, None]
        skipped = self._skipped(state, pairs.positions, live, decision is None)
        pairs = pairs.replace(positions=pairs.positions - skipped[:, None])
        alone = lambda: causal(take(pairs.tokens, newest), take(pairs.positions, newest)[:, 0])
        if cache is None:
            features, pairs = take(features, newest), alone()
        states = self.head.follow(self.head.enter(params.draft.head, features.astype(self._dtype(params))), state.state)
        if cache is not None and decision is None and not self.head.carries_state:
            # of a chunk only the newest pair needs more than keys and values, so that XLA leaves out what follows these
            # in the last layer
            before = live & (jnp.arange(live.shape[1], dtype=jnp.int32) < last[:, None])
            entries = self._step(params, pairs, states, 0, cache).entries
            cache = _committed(cache, entries, before & _finite(entries), pairs.positions)
            states, live, pairs = take(states, newest), found, alone()
        step = self._step(params, pairs, states, 0, cache)
        if cache is not None:
            # the slots depend on the step, or XLA on CPU copies the cache to protect its readers
            cache = _committed(cache, step.entries, live & _finite(step.hidden), pairs.positions)
        at = jnp.zeros_like(newest) if step.hidden.shape[1] == 1 else newest
        kept = lambda new, old: jnp.where(found, take(new, at)[:, 0], old)
        return HeadState(cache=cache, hidden=kept(step.hidden, state.hidden), state=kept(step.state, state.state),
                         skipped=skipped)

    def _skipped(self, state: Any, positions: Array, live: Array, chunk: bool) -> Array:
        """Returns the number of tokens of the text that the head has not read, `i32[B]`, after those before the next
        ones are known to be missing.

        Args:
            state: the head's state, with `cache` and `skipped`.
            positions: `i32[B, W]`, positions of the next tokens, or pairs, in the text.
            live: `bool[B, W]`, which of them count.
            chunk: True for a chunk of a text, before which there may be a gap; False for a round.
        """
        found = live.any(1)
        first = take(positions, jnp.argmax(live, 1).astype(jnp.int32)[:, None])[:, 0]
        skipped = jnp.where(found, jnp.minimum(state.skipped, first), state.skipped)
        if not chunk or state.cache is None or not self.takes_gaps:
            return skipped
        return jnp.where(found, jnp.maximum(skipped, first - state.cache.length), skipped)

    def _begun(self, s: State, state: Any) -> Any:
        """Returns the state at the beginning of a round: a row that goes on after its end keeps nothing of tokens that
        were cut, and nothing at all if it was cut to fewer tokens than were skipped. A text whose cache does not take
        that is not cut."""
        if "truncation" not in state.cache.supports:
            return state
        skipped = jnp.minimum(state.skipped, s.length - 1)
        return state.replace(cache=truncate(state.cache, s.length - 1 - skipped), skipped=skipped)

    def _step(self, params: Params, window: Window, state: Array, depth: Depth, cache: Any) -> HeadStep:
        """Runs the head on pairs: the tokens of a window, and the states before them."""
        attend = None if cache is None else lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, window,
                                                                                           **options)
        return self.head.step(params.draft.head, window.tokens, lambda x: embeddings(self.model, params.target, x),
                              state, window.positions, depth, attend)

    def _logits(self, params: Params, hidden: Array, depth: Depth) -> Array:
        """Returns logits over the target's vocabulary; tokens that the head does not know have -inf."""
        def of(hidden: Array, depth: Depth) -> Array:
            logits = self.head.logits(params.draft.head, hidden, depth,
                                      lambda hidden: logits_of(self.model, params.target, hidden))
            return spread(logits, params.draft.ids, self.vocab_size)

        if isinstance(depth, int) or not self.head.parallel or hidden.shape[1] == 1:
            return of(hidden, depth)
        return of_depths(depth, of, hidden, depth)

    def _dtype(self, params: Params) -> Any:
        # of most weights: some, such as the corrections of a router, stay float32, and kernels may be packed
        leaves = jax.tree.leaves(params.draft.head, is_leaf=lambda x: isinstance(x, Packed))
        arrays = [x for x in leaves if not isinstance(x, Packed) and jnp.issubdtype(x.dtype, jnp.floating)]
        return max(arrays, key=lambda x: x.size).dtype if arrays else jnp.float32

    def _shapes(self, params: Params, batch: int) -> HeadStep:
        """Returns shapes and dtypes of the head's output for one pair of each of `batch` rows."""
        def one(params: Params) -> HeadStep:
            cache = self.head.init_cache(batch, 1, self._dtype(params))
            state = jnp.zeros((batch, 1, self.head.state_width), self._dtype(params))
            nothing = jnp.zeros((batch, 1), jnp.int32)
            return self._step(params, causal(nothing, nothing[:, 0]), state, 0, cache)

        return jax.eval_shape(one, params)


def _finite(values: Any) -> Array:
    """Returns which positions of arrays `[B, W, ...]` have finite numbers in all of them, `bool[B, W]`."""
    return functools.reduce(jnp.logical_and, (jnp.isfinite(x).reshape(*x.shape[:2], -1).all(-1)
                                              for x in jax.tree.leaves(values)))


def _committed(cache: Cache, entries: Any, kept: Array, positions: Array) -> Cache:
    return cache.commit(entries, jnp.where(kept, positions, -1))


def trained(lm: Any, draft: Any, *systems: str) -> TrainedHead:
    """Returns the source of drafts for a target, from a drafter that was trained for one of the methods `systems`.

    Args:
        lm: the target, a result of `decodax.load`.
        draft: a `TrainedDrafter`, or the path of one; None: the one that was trained with the target and lies in its
            directory, or is shipped for it, for "mtp" and "medusa" else the layers or heads in its own files.
        systems: names of the methods, the most likely first.

    Raises:
        ValueError: none is given and none is shipped, or it is one of another method or for another target.
    """
    if draft is None:
        found = heads_beside(lm.directory, *systems) or next(
            (path for system in systems if (path := shipped_drafter(system, lm.name))), None) or own_drafter(
                lm, *systems)
        if found is None:
            raise ValueError(f"draft: {systems[0]!r} needs a drafter that was trained for {lm.name!r}, and none is "
                             "shipped; takes draft=decodax.load_drafter(DIRECTORY, lm)")
        draft = found
    if isinstance(draft, (str, os.PathLike)):
        draft = load_drafter(draft, lm)
    if not isinstance(draft, TrainedDrafter):
        raise ValueError(f"draft: got {shown(draft)}, {systems[0]!r} takes a trained drafter, from "
                         "decodax.load_drafter")
    if draft.system not in systems:
        raise ValueError(f"draft: got one of {draft.system!r}, {systems[0]!r} takes one of "
                         f"{' or '.join(map(repr, systems))}")
    draft.check(lm)
    return TrainedHead(draft.head, HeadWeights(draft.params, draft.ids)).for_target(lm)
