"""d3LLM: a pipeline of blocks by entropy, with a delayed cache ("d3LLM: Ultra-Fast Diffusion LLM using
Pseudo-Trajectory Distillation", Qian et al., 2026).

`Delayed` determines when a finished block may be cached. The rules are those of the authors' code, which differ for
LLaDA and Dream (`WithBest`, `InTurn`). `Delayed(0, refresh=1)` is no cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.policies import Caching, Memory, Unmask
from decodax.algorithms.diffusion.rules.scores import NegEntropy
from decodax.algorithms.diffusion.rules.stops import FirstEnd
from decodax.algorithms.diffusion.rules.unmasking import Threshold, best
from decodax.algorithms.diffusion.samplers.d2f import Pipelined, pipeline
from decodax.algorithms.diffusion.view import Seen, View, span
from decodax.common.options import Count, NonNegative, Share
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct


@dataclasses.dataclass(frozen=True)
class WithBest(Unmask):
    """Unmasks the candidates of `rule`, and always the candidate with the best score in all active blocks (the authors'
    code for LLaDA, whose loop over the positions by rising entropy never skips the first)."""

    rule: Any

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.rule.of

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return self.rule(view, seen, score, memory) | best(score, view.active, jnp.ones_like(view.step))


@struct
class Lag(Struct):
    """Memory of the caching rule `Delayed`.

    Attributes:
        begins: `i32[B, delay]`, start of the window in each of the last `delay` steps, oldest first.
        cached: `i32[B]`; all positions before this one have an entry in the cache.
    """

    begins: Array
    cached: Array


@dataclasses.dataclass(frozen=True)
class Delayed(Caching):
    """d3LLM's cache for models that attend to the whole text: blocks are cached from left to right.

    A block is cached `delay` forward passes after it and all blocks before it are finished, when its neighbours change
    less (the authors' code for Dream; `InTurn` is that for LLaDA). While a finished block waits, forward passes are
    wide and also refresh the blocks cached before. Afterwards a narrow forward pass recomputes all positions that are
    not cached: the finished blocks that it stores, the window, and the positions after it. With block-causal models the
    entries of finished blocks are exact, and so is this cache.

    Attributes:
        delay: number of forward passes, 0 or more.
        refresh: number of steps from one wide forward pass to the next, unless the forward pass stores a block; with 1
            each is wide. None: they are wide only while blocks wait.
        suffix: number of positions, from the window's start on, that a narrow forward pass computes. In the published
            rule it is at least the number of new tokens.
        lead: maximum number of finished positions that a narrow forward pass can store; if there are more, it is wide.
            None: the width of a window.
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
        """Returns the position before which all blocks have been finished for `delay` forward passes, `i32[B]`."""
        return memory.begins[:, 0] if self.delay else view.start

    def needs_refresh(self, view: View, memory: Any) -> Array:
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
    """Memory of `InTurn`.

    Attributes:
        first: `i32[B]`, start of the text's first block.
        cached: `i32[B]`; the cache has the positions before this one.
        since: `i32[B]`, number of the forward pass, from 1, in which the delay of the next block to be cached began; -1
            while that block is not finished.
    """

    first: Array
    cached: Array
    since: Array


@dataclasses.dataclass(frozen=True)
class InTurn(Delayed):
    """d3LLM's cache as in the authors' code for LLaDA. Unlike in `Delayed`, a block's delay begins only when the block
    before it is cached, so two blocks that are finished at once are cached `delay` forward passes apart."""

    block: int = 32

    def init(self, view: View) -> Memory:
        zero = jnp.zeros_like(view.start)
        return Turn(first=view.start + 0, cached=zero, since=zero)

    def _done(self, view: View, memory: Turn, cached: Array) -> tuple[Array, Array]:
        """Returns the end of the block after `cached` (`i32[B]`), `i32[B]`, and True if it is finished, `bool[B]`."""
        end = jnp.where(cached < memory.first, memory.first, cached + self.block)
        return end, end <= view.start

    def _timed(self, view: View, memory: Turn) -> tuple[Array, Array]:
        """Returns the end of the positions that the next forward pass caches, and the forward pass in which the delay
        of the block after them began, `i32[B]` each."""
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


@ALGORITHMS.register("d3llm", "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation",
                     "Qian et al. 2026", family="masked-diffusion", needs="a diffusion model")
def d3llm(lm: Any, threshold: NonNegative = 0.5, block_add_threshold: Share = 0.1,
          decoded_token_threshold: Share = 0.95, most: Count = 8, cache_delay_iter: WholeNumber | None = 1,
          refresh_interval: Count | None = None, suffix: Count = 256, kind: Literal["llada", "dream"] | None = None,
          block_length: Count | None = None) -> MaskedDiffusion:
    """Fills several blocks at once by entropy, and caches finished blocks with a delay.

    The loop for LLaDA always unmasks the position of lowest entropy, and starts the delay of a block when the one
    before it is cached. The loop for Dream, with a cache, predicts the first position that it recomputes from that
    position's own logits; here it is predicted from the position before it, as all others.

    Args:
        threshold: maximum entropy, in nats, of a candidate that is unmasked.
        block_add_threshold: share of decided positions of a block at which the next one is added.
        decoded_token_threshold: share of decided positions of a block at which the next one is fully active.
        most: maximum number of blocks at a time; the authors set no bound.
        cache_delay_iter: number of forward passes after which a finished block is cached. None: no cache.
        refresh_interval: number of steps from one forward pass over the whole text to the next. None: only while blocks
            wait.
        suffix: number of positions that a forward pass recomputes, from the first unfinished block on.
        kind: which of the authors' two loops. None: "dream" if the model's logits predict the next position, else
            "llada".
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows = pipeline(adapter, block_length, block_add_threshold, decoded_token_threshold, most)
    sure: Unmask = Threshold(threshold, "entropy")
    delay, refresh = cache_delay_iter, refresh_interval
    caching: Caching = NoCache() if delay is None else Delayed(delay, refresh, suffix)
    if kind == "llada" or (kind is None and not adapter.shift):
        sure = WithBest(sure)
        caching = caching if delay is None else InTurn(delay, refresh, suffix, block=windows.block)
    return MaskedDiffusion(adapter, windows, NegEntropy(), Pipelined(sure, windows, "first"), caching=caching,
                           stops=(FirstEnd(filled=True),))
