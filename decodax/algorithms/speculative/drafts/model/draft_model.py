"""A draft model: a smaller network with the target's tokenizer (Leviathan et al. 2023, Chen et al. 2023).

It has its own cache, which has verified tokens only. The nodes of a growing tree are kept in a buffer beside the cache,
and the accepted ones are moved to the cache. A round begins with a window of the two newest tokens, since the last
accepted draft has not been processed yet. Other missing tokens (the prompt, rounds in which another source drafted) are
processed before that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.common.axes import constrain
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.capabilities import Draftable, check_draft_cache, tree_buffer
from decodax.core.checks import draft_weights
from decodax.core.composed import data
from decodax.core.loaded import Loaded, network_of
from decodax.core.mesh import heads
from decodax.core.resized import Resized
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window, causal, take


@struct
class Drafting(Struct):
    """State of a draft model.

    Attributes:
        cache: the draft model's cache of verified tokens.
        buffer: within a round, the buffer with the nodes of the tree.
        nodes: within a round, `i32[B or 1, room]`, the window node of each entry of the buffer.
    """

    cache: Cache
    buffer: Draftable | None = None
    nodes: Array | None = None


@dataclasses.dataclass(frozen=True)
class DraftModel(Source):
    """Drafts with a second, smaller model, which has a cache of its own.

    Attributes:
        model: the draft model: a `Model`, or the result of `decodax.load`.
        weights: the weights of a bare `Model`; None if `model` is the result of `decodax.load`. `generate` passes them
            to the compiled programs. If you call `decodax.core.drivers` yourself, put them into `Params.draft`.
        vocab_size: number of logits of the target. None: that of the sampling policy if it is known, else that of the
            draft model.
        chunk: number of tokens in one forward pass while the draft model processes text that is missing in its cache,
            such as the prompt.
        reads: number of token ids that the draft model knows; larger ids are replaced by `reads - 1`. None: the
            vocabulary size of the result of `decodax.load`; a bare `Model` gets all ids as they are.

    The two vocabularies may be padded to different sizes, as in small and large Qwen 2.5 models. `Resized` then cuts or
    pads the draft's logits to `vocab_size`.
    """

    __repr__ = short

    model: Any
    weights: Any = data()
    vocab_size: int | None = None
    chunk: int = 64
    reads: int | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}, takes at least 1")
        if isinstance(self.model, Loaded):
            object.__setattr__(self, "reads", self.reads or self.model.vocab_size)
        network, weights = network_of(self.model)       # the network is static, its weights are data
        object.__setattr__(self, "model", network)
        object.__setattr__(self, "weights", self.weights if weights is None else weights)

    def for_vocabulary(self, size: int) -> DraftModel:
        """Returns the drafter for a target with `size` logits: `vocab_size` is set to it if it was None."""
        return self if self.vocab_size else dataclasses.replace(self, vocab_size=size)

    @property
    def fitted(self) -> Resized:
        """The model with its logits cut or padded to the target's vocabulary."""
        return Resized(self.model, self.reads, self.vocab_size)

    def check_fit(self, model: Any, cache: Any) -> None:
        check_draft_cache(self.model, cache.capacity)

    def init(self, params: Params, s: State) -> Drafting:
        draft_weights(params.draft, self)
        cache = self.model.init_cache(s.batch, s.cache.capacity, params=params.draft)
        return Drafting(cache=constrain(cache, heads(cache)))

    def start(self, params: Params, s: State, state: Drafting, room: int) -> tuple[Drafting, Answer]:
        cache = catch_up(self.fitted, params.draft, s, state.cache, self.chunk)
        positions = s.length[:, None] - 2 + jnp.arange(2, dtype=jnp.int32)
        live = (positions >= cache.length[:, None]) & (positions >= 0) & s.running[:, None]
        tokens = jnp.take_along_axis(s.tokens, jnp.maximum(positions, 0), 1)
        out = self.fitted.apply(params.draft, causal(tokens, s.length - 2, live), cache)
        cache = cache.commit(out.entries, _verified(live, out, positions))
        buffer = tree_buffer(cache, out.entries, room)
        last = jnp.ones((s.batch, 1), jnp.int32)
        answer = Answer(out.logits(last), take(out.hidden, last))
        return Drafting(cache=cache, buffer=buffer.replace(base=None)), answer

    def extend(self, params: Params, s: State, state: Drafting, level: Level) -> tuple[Drafting, Answer]:
        assert state.buffer is not None
        buffer = state.buffer.replace(base=state.cache)
        window = Window(tokens=level.tokens, positions=level.positions, mask=level.inside,
                        live=jnp.ones(level.tokens.shape, bool))
        out = self.fitted.apply(params.draft, window, buffer.seen_by(level.sees))
        buffer = buffer.append(out.entries, level.positions, level.at).replace(base=None)
        return state.replace(buffer=buffer), Answer(out.logits(), out.hidden)

    def place(self, state: Drafting, slots: Array) -> Drafting:
        return state.replace(nodes=slots)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Drafting) -> Drafting:
        if decision is None or state.buffer is None or state.nodes is None:
            return Drafting(cache=state.cache)
        nodes = jnp.broadcast_to(state.nodes, (s.batch, state.nodes.shape[1]))
        slots = jnp.where(nodes >= 0, jnp.take_along_axis(decision.slots, jnp.maximum(nodes, 0), 1), -1)
        return Drafting(cache=state.buffer.replace(base=state.cache).commit(slots) if nodes.shape[1] else state.cache)


def catch_up(model: Model, weights: Any, s: State, cache: Any, chunk: int, newest: int = 2) -> Any:
    """Runs a draft model on the tokens of each row that are not in its cache yet, except the last `newest` tokens of
    the text, in chunks of `chunk` tokens. Returns the new cache. In most rounds no token is missing."""
    lacks = jnp.where(s.running, s.length - newest - cache.length, 0)

    def visit(i: Array, cache: Any) -> Any:
        positions = cache.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        live = (positions < s.length[:, None] - newest) & s.running[:, None]
        tokens = jnp.take_along_axis(s.tokens, jnp.minimum(positions, s.tokens.shape[1] - 1), 1)
        out = model.apply(weights, causal(tokens, cache.length, live).replace(is_prefill=True), cache)
        return cache.commit(out.entries, _verified(live, out, positions))

    return lax.fori_loop(0, (jnp.max(lacks) + chunk - 1) // chunk, visit, cache)


def _verified(live: Array, out: Out, positions: Array) -> Array:
    # the slots must depend on the forward, or XLA on CPU copies the cache to protect its readers
    return jnp.where(live & jnp.isfinite(out.hidden).all(-1), positions, -1)


