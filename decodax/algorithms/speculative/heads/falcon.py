"""Falcon: a drafter that predicts a block of tokens in each pass ("Falcon: Faster and Parallel Inference of Large
Language Models through Enhanced Semi-Autoregressive Drafting and Custom-Designed Decoding Tree", Gao et al., 2024).

Within a block the tokens are predicted independently of each other; the next block reads the tokens that were chosen.
So a tree of `k m` levels takes `m` passes of the drafter. Training: `decodax.train.drafting.falcon`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.algorithms.speculative.source import Answer, Level, Shape
from decodax.algorithms.speculative.trees.published import FALCON_75
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.axes import constrain
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.capabilities import Draftable, tree_buffer, truncate
from decodax.core.checks import draft_weights
from decodax.core.mesh import heads
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings
from decodax.core.window import Window, take
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.head import DraftHead


@struct
class FalconState(Struct):
    """State of Falcon's drafter. The fields after `skipped` are those of a round, for the newest token and each
    expanded node.

    Attributes:
        cache: keys and values of verified pairs.
        recent: `f[B, k, D]`, the LSTM's outputs for the last `k` of them.
        carry: `f[B, c]`, its state after the newest one.
        skipped: `i32[B]`, number of pairs of the text that the drafter has not read. Its own positions leave them out.
        blocks: `f[B, 1 + room, k, D]`, the hidden states that the last complete block on a node's path predicts.
        carries: `f[B, 1 + room, c]`, the LSTM's state after that block.
        tokens: `i32[B, 1 + room, k]`, the last tokens of a path.
        complete: `bool[B, 1 + room]`, True for nodes that end a block.
        buffer: the buffer with the keys and values of the pairs of each node that ends a block.
    """

    cache: Cache
    recent: Array
    carry: Array
    skipped: Array
    blocks: Array | None = None
    carries: Array | None = None
    tokens: Array | None = None
    complete: Array | None = None
    buffer: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class SemiAutoregressive(TrainedHead):
    """Drafts in blocks of tokens.

    Attributes:
        head: the head's network, a `FalconHead`.
        weights: its `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
    """

    __repr__ = short

    head: FalconHead
    takes: ClassVar[tuple[type[DraftHead], str]] = FalconHead, "one with Falcon's head"

    def check_chained(self) -> None:
        raise ValueError("draft: Falcon computes a block from the one before, so it does not take a chain of several "
                         "nodes at once")

    def init(self, params: Params, s: State) -> FalconState:     # type: ignore[override]
        draft_weights(params.draft, self.head, HeadWeights)
        h, dtype = self.head, self._dtype(params)
        cache = h.init_cache(s.batch, s.cache.capacity, dtype)
        assert cache is not None
        return FalconState(cache=constrain(cache, heads(cache)), skipped=jnp.zeros(s.batch, jnp.int32),
                           carry=jnp.zeros((s.batch, h.carry_width), dtype),
                           recent=jnp.zeros((s.batch, h.block, h.config.width), dtype))

    def start(self, params: Params, s: State, state: FalconState, room: int) -> tuple[FalconState, Answer]:    # type: ignore[override]
        k, state = self.head.block, self._begun(s, state)
        cache, read = state.cache, s.length - 1 - state.skipped
        positions = read[:, None] - k + jnp.arange(k, dtype=jnp.int32)
        hidden, entries = self._layer(params, state.recent, positions, jnp.ones((1, k, k), bool),
                                      truncate(cache, jnp.maximum(read - k, 0)))
        spread = lambda x: jnp.pad(x[:, None], ((0, 0), (0, room), *[(0, 0)] * (x.ndim - 1)))
        state = state.replace(
            blocks=spread(hidden), carries=spread(state.carry), complete=spread(jnp.ones(s.batch, bool)),
            tokens=spread(jnp.zeros((s.batch, k), jnp.int32)),
            buffer=tree_buffer(cache, entries, room * k).replace(base=None))
        return state, Answer(self._logits(params, hidden[:, :1], 0), hidden[:, :1])

    def extend(self, params: Params, s: State, state: FalconState, level: Level) -> tuple[FalconState, Answer]:    # type: ignore[override]
        if level.chained and level.tokens.shape[1] > 1:
            self.check_chained()
        assert state.blocks is not None and state.carries is not None and state.buffer is not None
        assert state.complete is not None and state.tokens is not None
        (B, w), k, c = level.tokens.shape, self.head.block, self.head.carry_width
        depth = level.positions - s.length[:, None] + 1
        complete = depth % k == 0
        before, carry = take(state.blocks, level.parents), take(state.carries, level.parents)
        tokens = jnp.concatenate([take(state.tokens, level.parents)[:, :, 1:], level.tokens[..., None]], 2)
        ends = level.positions - state.skipped[:, None]
        positions = (ends[..., None] - k + jnp.arange(k, dtype=jnp.int32)).reshape(B, w * k)
        sees = jnp.repeat(jnp.repeat(level.sees & state.complete[:, None, 1:], k, 2), k, 1)
        buffer = state.buffer

        def block() -> tuple[Array, Array, Any]:
            embedded = embeddings(self.model, params.target, tokens.reshape(B, w * k)).astype(before.dtype)
            x, after = self.head.read(params.draft.head, embedded.reshape(B * w, k, -1),
                                      before.reshape(B * w, k, -1), carry.reshape(B * w, c))
            node = np.arange(w * k) // k
            hidden, entries = self._layer(params, x.reshape(B, w * k, -1), positions, node[None, :, None] == node,
                                          buffer.replace(base=state.cache).seen_by(sees))
            return hidden.reshape(before.shape), after.reshape(carry.shape), entries

        # levels within a block only look up what it predicts
        shapes = jax.eval_shape(block)
        blocks, carries, entries = lax.cond(complete.any(), block, lambda: jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), shapes))
        blocks = jnp.where(complete[..., None, None], blocks, before)
        carries = jnp.where(complete[..., None], carries, carry)
        put = lambda held, new: lax.dynamic_update_slice_in_dim(held, new, level.at + 1, 1)
        state = state.replace(blocks=put(state.blocks, blocks), carries=put(state.carries, carries),
                              tokens=put(state.tokens, tokens), complete=put(state.complete, complete),
                              buffer=buffer.append(entries, positions, level.at * k).replace(base=None))
        hidden = jnp.take_along_axis(blocks, (depth % k)[..., None, None], 2)[:, :, 0]
        return state, Answer(self._logits(params, hidden, depth), hidden)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,    # type: ignore[override]
                state: FalconState) -> FalconState:
        features, pairs, live = self._pairs(params, s, window, out, decision)
        k, dtype = self.head.block, self._dtype(params)
        skipped = self._skipped(state, pairs.positions, live, decision is None)
        positions = pairs.positions - skipped[:, None]
        embedded = embeddings(self.model, params.target, pairs.tokens).astype(dtype)
        x, carry = self.head.read(params.draft.head, embedded, features.astype(dtype), state.carry, live)
        # the slots depend on the pairs, or XLA on CPU copies the cache to protect its readers
        kept = live & jnp.isfinite(x).all(-1)
        cache = state.cache.commit(self.head.context(params.draft.head, x, positions),
                                   jnp.where(kept, positions, -1))
        index = jnp.arange(live.shape[1], dtype=jnp.int32)
        first, last = jnp.argmax(live, 1)[:, None], jnp.max(jnp.where(live, index, -1), 1)[:, None]
        at = last + jnp.arange(1 - k, 1, dtype=jnp.int32)
        old = take(state.recent, jnp.clip(k + at - first, 0, k - 1))
        recent = jnp.where((at >= first)[..., None], take(x, jnp.maximum(at, 0)), old)
        recent = jnp.where((last >= 0)[..., None], recent, state.recent)
        return FalconState(cache=cache, carry=carry, skipped=skipped, recent=recent)

    def _layer(self, params: Params, x: Array, positions: Array, mask: Any, cache: Any) -> tuple[Array, Any]:
        """Returns the decoder layer's output for outputs of the LSTM, and its entries."""
        nothing = jnp.zeros(positions.shape, jnp.int32)
        window = Window(tokens=nothing, positions=positions, mask=mask, live=positions >= 0)
        step = self._step(params, window, x, 0, cache)
        return step.hidden, step.entries


@ALGORITHMS.register("falcon", "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced "
                     "Semi-Autoregressive Drafting and Custom-Designed Decoding Tree", "Gao et al. 2024",
                     family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def falcon(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts a tree with a layer that predicts a block of tokens in each pass.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree; None: the authors' 75 nodes in 4 levels, which are 2 blocks of 2.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    return Speculative(SemiAutoregressive.trained(lm, draft, "falcon"), verify or SeedExact(), shape or FALCON_75)
