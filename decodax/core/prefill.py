"""Prefill as an algorithm: each round writes a chunk of the prompt into the cache and emits no token.

So chunked prefill uses the same round as decoding. The newest prompt token is left out: as in every later round, the
newest token opens the next window.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Algorithm, Observer
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal


@dataclasses.dataclass(frozen=True)
class Prefill(Algorithm):
    """Writes prompts into the cache in chunks of `width` tokens.

    Attributes:
        reader: the observer that gets each chunk, or None.
        width: number of tokens in a chunk.
    """

    reader: Observer | None
    width: int

    def init(self, params: Params, s: State) -> Any:
        return s.algo, begun(s)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        algo, start = s.algo
        # the buffer's end may cut the last chunk short: it then starts earlier and writes some entries once more
        begin = jnp.minimum(start, s.tokens.shape[1] - self.width)
        tokens = lax.dynamic_slice_in_dim(s.tokens, begin, self.width, 1)
        positions = begin + jnp.arange(self.width, dtype=jnp.int32)
        live = (positions < s.prompt_length[:, None] - 1) & (positions >= start) & s.running[:, None]
        window = causal(tokens, jnp.broadcast_to(begin, s.length.shape), live).replace(is_prefill=True)
        # a reader is shown the text as it stands
        order = None
        if self.reader is None and (ordered := s.cache.layout.order) is not None:
            order = ordered(self.width)
        return window if order is None else window.ordered(order), (algo, start)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        told, start = algo
        if self.reader is not None:
            told = self.reader.observe(params, s, window, out, told)
        finite = jnp.isfinite(out.hidden).all(-1)
        slots = jnp.where(window.live & finite, window.positions, -1)
        broken = (window.live & ~finite).any(1)
        none = jnp.zeros((s.batch, 1), jnp.int32)
        return Decision(tokens=none - 1, count=broken.astype(jnp.int32), slots=slots, source=none,
                        algo=(told, start + self.width))


@dataclasses.dataclass(frozen=True)
class Extend(Algorithm):
    """Writes the rest of prompts whose first tokens are already in a cache that is ready for decoding, up to `width`
    tokens in a round, and emits no token. Like decoding rounds, it commits at most `Cache.max_commit` tokens."""

    width: int

    def init(self, params: Params, s: State) -> Any:
        return None

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        start = s.cache.length
        positions = start[:, None] + jnp.arange(self.width, dtype=jnp.int32)
        live = (positions < s.prompt_length[:, None] - 1) & s.running[:, None]
        tokens = jnp.take_along_axis(s.tokens, jnp.minimum(positions, s.tokens.shape[1] - 1), 1)
        return causal(tokens, start, live), None

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        finite = jnp.isfinite(out.hidden).all(-1)
        most = self.width if (horizon := s.cache.max_commit()) is None else horizon[:, None]
        keep = window.live & (jnp.arange(self.width, dtype=jnp.int32) < most)
        none = jnp.zeros((s.batch, 1), jnp.int32)
        return Decision(tokens=none - 1, count=(keep & ~finite).any(1).astype(jnp.int32), source=none, algo=None,
                        slots=jnp.where(keep & finite, window.positions, -1))

    @staticmethod
    def left(s: State) -> Array:
        """Returns the rows whose prompts are not completely in the cache, `bool[B]`."""
        return s.running & (s.cache.length < s.prompt_length - 1)


@struct
class Silent(Struct):
    """The sampling policy of a prefill, which draws nothing: no transforms, no stop strings, no end tokens (`eos` is
    `i32[B, 0]`)."""

    eos: Array
    stops = None

    def over(self, s: State, window: Window, out: Out) -> Silent:
        return self

    def advance(self, node: Array, token: Array) -> Any:
        return None


def begun(s: State) -> Array:
    """Returns the number of tokens in the cache of the row that has the fewest, `i32[]`: every row has at least this
    many."""
    return jnp.min(s.cache.length)


def prefill_rounds(s: State, width: int) -> Array:
    """Returns the number of chunks of `width` tokens for the rest of the longest prompt, `i32[]`."""
    return (jnp.max(s.prompt_length) - 1 - begun(s) + width - 1) // width
