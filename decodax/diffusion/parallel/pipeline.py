"""Several blocks at once: the pipelines of D2F (Wang et al. 2025) and d3LLM (Qian et al. 2026).

A block joins the work before the one in front of it is done: `Pipeline` says when, `Pipelined` what is unmasked in
blocks that are still half blind, and `Delayed` when a finished block is clean enough to be cached. The rules are those
of the authors' code, which are not the same for LLaDA and for Dream (`WithBest`, `InTurn`). `Pipeline(add=1, full=1)`
is `Blocks`, `Delayed(0, refresh=1)` no cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.diffusion.adapter import Nodes
from decodax.diffusion.policies import Caching, Memory, Seen, Unmask, View, span
from decodax.diffusion.rules.unmasking import best
from decodax.diffusion.rules.windows import Blocks
from decodax.struct import Struct, struct


@dataclasses.dataclass(frozen=True)
class Pipeline(Blocks):
    """Blocks of `block` positions, up to `most` of them at work; the region begins with the first unfinished one.

    A block is added when the share `add` of the one before it is decided, and is fully active when that is the share
    `full`. The authors add blocks without a bound, so as many as the text has are the published rule.

    Attributes:
        add: more than 0. full: matters to `Pipelined` only. most: bounds the positions of a round.
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
    """What `rule` unmasks anywhere, and the best by score of fully active blocks in which that is nothing.

    Attributes:
        windows: the pipeline whose blocks they are.
        force: "each" fully active block (D2F), or the "first" with open positions (d3LLM).
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
    """What `rule` unmasks, and the best by score in any case: of all blocks at work, wherever it lies (d3LLM's code for
    LLaDA, whose loop over the positions by rising entropy spares the first)."""

    rule: Any

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.rule.of

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return self.rule(view, seen, score, memory) | best(score, view.active, jnp.ones_like(view.step))


@struct
class Lag(Struct):
    """`begins`: `i32[B, delay]` where the region began in the steps before, the oldest first. `cached`: `i32[B]` the
    cache holds the positions before it."""

    begins: Array
    cached: Array


@dataclasses.dataclass(frozen=True)
class Delayed(Caching):
    """d3LLM's cache for models that see the whole text: blocks are cached from left to right, each `delay` forwards
    after it and those before it are done, when its neighbours have settled (the authors' code for Dream; `InTurn` is
    that for LLaDA).

    While a finished block waits, forwards are wide, and what was cached before is renewed by them. Afterwards a narrow
    forward recomputes all that is not cached: the finished blocks that it stores, the region, and what follows. With
    block-causal models entries of finished blocks are exact, and so is this.

    Attributes:
        delay: 0 or more. refresh: every so many forwards is a wide one, unless it is to store a block; 1: each is.
        suffix: positions from the region's beginning on that a narrow forward reads; as many as the text has new tokens
            for the published rule.
        lead: finished positions that a narrow forward can store; more of them take a wide one. None: a region's width.
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
    """`first`: `i32[B]` where the text's first block begins. `cached`: `i32[B]` the cache holds the positions before
    it. `since`: `i32[B]` the forward, counted from 1, in which the delay of the next block to be cached began, -1 while
    that block is not done."""

    first: Array
    cached: Array
    since: Array


@dataclasses.dataclass(frozen=True)
class InTurn(Delayed):
    """`Delayed` with a block's delay beginning when the one before it is cached, if it is done then (d3LLM's code for
    LLaDA): two blocks that are done at once are cached `delay` forwards apart.

    Attributes:
        block: positions of a block.
    """

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
