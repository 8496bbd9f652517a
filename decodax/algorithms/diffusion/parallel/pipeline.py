"""Several blocks at once: the pipelines of D2F (Wang et al. 2025) and d3LLM (Qian et al. 2026).

Work on a block begins before the block in front of it is done. `Pipeline` says when, `Pipelined` which candidates of
blocks that have incomplete context are unmasked, and `Delayed` when a finished block may be cached. The rules are those
of the authors' code, which differ for LLaDA and Dream (`WithBest`, `InTurn`). `Pipeline(add=1, full=1)` is `Blocks`,
and `Delayed(0, refresh=1)` is no cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.policies import Caching, Memory, Seen, Unmask, View, span
from decodax.algorithms.diffusion.rules.unmasking import best
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.common.struct import Struct, struct


@dataclasses.dataclass(frozen=True)
class Pipeline(Blocks):
    """Blocks of `block` positions, at most `most` of them at a time. The region begins with the first unfinished block.

    A block is added when the share `add` of the block before it is decided, and becomes fully active when that share
    reaches `full`. The authors add blocks without a bound; with as many blocks as the text has this is the published
    rule.

    Attributes:
        add: more than 0. full: used by `Pipelined` only. most: bounds the positions of a round.
    """

    add: float = 0.1
    full: float = 0.95
    most: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("add", "full"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes more than 0 up to 1")
        if self.most < 1:
            raise ValueError(f"most: got {self.most}, takes 1 or more")

    @property
    def width(self) -> int:
        return self.block * self.most

    @property
    def least(self) -> int:
        return self.block

    def count(self, positions: Array) -> Array:
        """`i32[R, most]`: how many of `bool[R, W]` each block has."""
        return positions.reshape(-1, self.most, self.block).sum(2, dtype=jnp.int32)

    def decided(self, view: View, share: float) -> Array:
        """`bool[R, most]`: blocks behind those of which this share is decided; the first block is."""
        all_ = self.count(view.editable & view.inside)
        done = (all_ - self.count(view.masked)) / jnp.maximum(all_, 1) >= jnp.float32(share)
        return jnp.pad((done | (all_ == 0))[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        added = jnp.cumprod(self.decided(view, self.add), 1).astype(bool)
        return view.masked & jnp.repeat(added, self.block, 1)

    def finished(self, view: View, memory: Memory) -> Array:
        blocks = jnp.cumprod(self.count(view.masked) == 0, 1).sum(1, dtype=jnp.int32)
        return jnp.clip(blocks * self.block, 0, jnp.maximum(view.end - view.start, 0))


@dataclasses.dataclass(frozen=True)
class Pipelined(Unmask):
    """The candidates that `rule` unmasks in any block, and the best one by score of each fully active block in which
    there are none.

    Attributes:
        windows: the pipeline to which the blocks belong.
        force: "each" fully active block (D2F), or only the "first" block with open positions (d3LLM).
    """

    rule: Any
    windows: Pipeline
    force: Literal["each", "first"] = "each"

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.rule.of

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        w = self.windows
        taken = self.rule(view, seen, score, memory) & view.active
        full = w.decided(view, w.full) & (w.count(view.active) > 0)
        if self.force == "first":
            full = full & (jnp.cumsum(full, 1) == 1)
        stuck = full & (w.count(taken) == 0)
        blocks = lambda x: x.reshape(-1, w.block)
        first = best(blocks(score), blocks(view.active), jnp.ones(stuck.size, jnp.int32)).reshape(taken.shape)
        return taken | (first & jnp.repeat(stuck, w.block, 1))


@dataclasses.dataclass(frozen=True)
class WithBest(Unmask):
    """The candidates that `rule` unmasks, and always the best one by score in all active blocks (d3LLM's code for
    LLaDA, whose loop over the positions by rising entropy spares the first)."""

    rule: Any

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.rule.of

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return self.rule(view, seen, score, memory) | best(score, view.active, jnp.ones_like(view.step))


@struct
class Lag(Struct):
    """The memory of `Delayed`: `begins`: `i32[B, delay]`, where the region began in the last steps, oldest first.
    `cached`: `i32[B]`, the cache holds the positions before it."""

    begins: Array
    cached: Array


@dataclasses.dataclass(frozen=True)
class Delayed(Caching):
    """d3LLM's cache for models that attend to the whole text: blocks are cached from left to right. A block is cached
    `delay` forwards after it and all blocks before it are done, when its neighbours have settled (the authors' code for
    Dream; `InTurn` is that for LLaDA).

    While a finished block waits, forwards are wide and also refresh what was cached before. Afterwards a narrow forward
    recomputes all that is not cached: the finished blocks that it stores, the region, and what follows. With
    block-causal models the entries of finished blocks are exact, and so is this cache.

    Attributes:
        delay: 0 or more. refresh: steps from one wide forward to the next, except where a forward is to store a block;
            with 1 each forward is wide.
        suffix: the number of positions, from the region's start on, that a narrow forward scores. In the published rule
            it is at least the number of new tokens.
        lead: the number of finished positions that a narrow forward can store; if there are more, the forward is wide.
            None: the width of a region.
    """

    delay: int = 1
    refresh: int | None = None
    suffix: int = 256
    lead: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("delay", 0), ("refresh", 1), ("suffix", 1), ("lead", 1)):
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name}: got {value}, takes {low} or more")

    def _lead(self, view: View) -> int:
        return self.lead or view.positions.shape[1]

    def init(self, view: View) -> Memory:
        # the prompt counts as done before the first forward
        begins = jnp.zeros((view.start.shape[0], self.delay), jnp.int32)
        begins = begins.at[:, -1:].set(view.start[:, None]) if self.delay else begins
        return Lag(begins=begins, cached=jnp.zeros_like(view.start))

    def learn(self, before: View, seen: Seen, after: View, memory: Any) -> Memory:
        begins = jnp.concatenate([memory.begins, before.start[:, None]], 1)
        return Lag(begins=begins[:, 1:], cached=begins[:, 0])

    def _ripe(self, view: View, memory: Any) -> Array:
        """`i32[B]`: positions before it have been done long enough."""
        return memory.begins[:, 0] if self.delay else view.start

    def stale(self, view: View, memory: Any) -> Array:
        ripe = self._ripe(view, memory)
        waits = ripe < view.start
        if self.refresh is not None:
            waits = waits | ((view.round + 1) % self.refresh == 0)
        stale = waits & (ripe <= memory.cached) | (view.start - memory.cached > self._lead(view))
        return stale | (self.refresh == 1)

    def nodes(self, view: View, left: int, memory: Any) -> Nodes:
        W = view.positions.shape[1]
        nodes = span(view, max(self._lead(view), left), max(self.suffix, W))
        begin = jnp.minimum(memory.cached, view.start - left)
        return nodes.replace(live=nodes.live & (nodes.positions >= begin[:, None]))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Any) -> Array:
        return (positions < self._ripe(view, memory)[:, None]) & ~valid


@struct
class Turn(Struct):
    """The memory of `InTurn`. `first`: `i32[B]`, where the text's first block begins. `cached`: `i32[B]`, the cache
    holds the positions before it. `since`: `i32[B]`, the forward, counted from 1, in which the delay of the next block
    to be cached began; -1 while that block is not done."""

    first: Array
    cached: Array
    since: Array


@dataclasses.dataclass(frozen=True)
class InTurn(Delayed):
    """`Delayed`, except that a block's delay begins only once the block before it is cached (d3LLM's code for LLaDA):
    two blocks that are done at once are cached `delay` forwards apart."""

    block: int = 32

    def init(self, view: View) -> Memory:
        zero = jnp.zeros_like(view.start)
        return Turn(first=view.start + 0, cached=zero, since=zero)

    def _done(self, view: View, memory: Turn, cached: Array) -> tuple[Array, Array]:
        """The end of the block behind `cached` (`i32[B]`), and whether it is done (`bool[B]`)."""
        end = jnp.where(cached < memory.first, memory.first, cached + self.block)
        return end, end <= view.start

    def _timed(self, view: View, memory: Turn) -> tuple[Array, Array]:
        """`i32[B]` each: what the next forward lets the cache hold, and when the delay of the block behind began."""
        if not self.delay:
            return view.start, memory.since
        now = view.round + 1
        end, done = self._done(view, memory, memory.cached)
        since = jnp.where(done & (memory.since < 0), now, memory.since)
        ripe = done & (now - since >= self.delay)
        cached = jnp.where(ripe, end, memory.cached)
        follows = self._done(view, memory, cached)[1]
        return cached, jnp.where(ripe, jnp.where(follows, now, -1), since)

    def _ripe(self, view: View, memory: Any) -> Array:
        return self._timed(view, memory)[0]

    def learn(self, before: View, seen: Seen, after: View, memory: Any) -> Memory:
        cached, since = self._timed(before, memory)
        return memory.replace(cached=cached, since=since)
