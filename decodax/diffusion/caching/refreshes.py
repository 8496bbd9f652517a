"""Approximate caches by what they recompute: a vicinity, what was just decided, a few positions; frozen prefixes.

Under attention in both directions every entry of the cache goes stale with each unmasked token. These rules, all
training-free, differ in which positions a narrow forward computes anew and in when a wide one refreshes all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.diffusion.adapter import Nodes
from decodax.diffusion.caching.blocks import DualCache
from decodax.diffusion.canvas import paste
from decodax.diffusion.policies import Caching, Memory, Seen, Text, View, span
from decodax.diffusion.rules.scores import Random
from decodax.diffusion.rules.unmasking import Quota
from decodax.diffusion.stats import rank


@dataclasses.dataclass(frozen=True)
class Vicinity(DualCache):
    """dInfer's vicinity refresh (Ma et al. 2025): Fast-dLLM's dual cache whose narrow forwards also recompute the
    positions around the region, since entries change most near what was just decided.

    Attributes:
        before, after: so many positions on either side of the region.
        warmup: the text's first so many steps, and the one that fills the cache, are wide.
    """

    before: int = 16
    after: int = 16
    warmup: int = 0

    def stale(self, view: View, memory: Memory) -> Array:
        return super().stale(view, memory) | (view.round <= self.warmup)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, max(left, self.before), view.positions.shape[1] + self.after)


@dataclasses.dataclass(frozen=True)
class OwnBlock(DualCache):
    """The dual cache of blocks that have their own lengths (AdaBlock, Lu et al. 2025): a narrow forward recomputes the
    block, not all of the region in which it may end.

    Attributes:
        windows: the sampler's, a `Delimited`. The lengths that it remembers are remembered here once more.
    """

    windows: Any = None

    def fit(self, budget: int) -> OwnBlock:
        """With the windows that fit texts of `budget` new tokens."""
        return dataclasses.replace(self, windows=self.windows.fit(budget))

    @property
    def sizes(self) -> tuple[int | None, ...]:       # type: ignore[override]
        return (self.windows.block + 1, None)       # and the position before the block, which may predict its first

    def init(self, view: View) -> Memory:
        return self.windows.init(view)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return self.windows.learn(before, seen, after, memory)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        nodes = super().nodes(view, left, memory)
        return nodes.replace(live=nodes.live & (nodes.positions < (view.start + memory)[:, None]))


class Rewriting(Caching):
    """A cache into which every forward writes what it computed."""

    approximate = True

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return jnp.ones(positions.shape, bool)


@dataclasses.dataclass(frozen=True)
class Frozen(Rewriting):
    """FreeCache (FlashDLM, Hu et al. 2025): one wide forward at the beginning, and never again. A narrow forward
    recomputes the region and what follows it; as the region moves on, the entries behind it stay as the last forward
    made them, those unmasked last from their mask tokens.

    Attributes:
        suffix: so many positions from the region's beginning on; what lies behind them is read from the cache.
        before: so many positions before the region are recomputed too, and freeze later (FlashDLM's sliding window).
        near: what lies behind the suffix is not read, but by the first forward.
    """

    suffix: int = 256
    before: int = 0
    near: bool = False

    def stale(self, view: View, memory: Memory) -> Array:
        return view.refreshed < 0

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, max(left, self.before), max(self.suffix, view.positions.shape[1]))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        behind = positions >= (view.start + max(self.suffix, view.positions.shape[1]))[:, None]
        return ~behind if self.near else jnp.ones(positions.shape, bool)


@dataclasses.dataclass(frozen=True)
class DelayedTokens(Rewriting):
    """dKV-Cache-Decode (Ma et al. 2025): a token's entries enter the cache a step after it was decided, since its own
    embedding changes most then. A narrow forward recomputes what is open, in the region and behind it, and what the
    last step decided. With logits that point to the next position, the positions before open ones count as open, as in
    the authors' variant for Dream.

    Wide forwards come as in the authors' code for LLaDA: in a region's first `1 + delay` steps and whenever its step
    is a multiple of `refresh`.

    Attributes:
        delay: steps for which a decided token is recomputed. 0: its entry stays that of the mask token. None: until the
            next wide forward.
        refresh: steps from wide forward to wide forward; None: the region's first ones alone.
        packed: sizes of narrow rounds, ascending: what is live is gathered into the smallest that fits; what fits none
            takes a narrow round as long as the text.
    """

    delay: int | None = 1
    refresh: int | None = 4
    packed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.delay is not None and self.delay < 0:
            raise ValueError(f"delay: got {self.delay}, takes 0 or more, or None")
        if self.refresh is not None and self.refresh < 1:
            raise ValueError(f"refresh: got {self.refresh}, takes 1 or more, or None")
        if list(self.packed) != sorted({n for n in self.packed if n > 0}):
            raise ValueError(f"packed: got {self.packed}, takes ascending sizes")

    @property
    def sizes(self) -> tuple[int | None, ...]:       # type: ignore[override]
        return (*self.packed, None)

    def stale(self, view: View, memory: Memory) -> Array:
        first = (view.step <= (self.delay or 0)) | (view.refreshed < 0)
        return first if self.refresh is None else first | (view.step % self.refresh == 0)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        since = view.refreshed if self.delay is None else view.round - self.delay
        return scattered(with_left(_text(view).open, left) | _decided(view, since))


@dataclasses.dataclass(frozen=True)
class DKVCacheGreedy(Rewriting):
    """dKV-Cache-Greedy (Ma et al. 2025): a narrow forward recomputes only the positions that this step decides, those
    that the last one did, and the open ones nearest to the first. It must know them beforehand: the sampler's score
    has to be `Random(once=True)`, and its unmasking rule this `quota`.

    Attributes:
        quota: which positions the step decides, by that score.
        window: open positions that are recomputed for each of them, by turns the nearest to its left and to its right.
        refresh: a wide forward whenever the region's step is a multiple of this.
        packed: as in `DelayedTokens`. A step that unmasks `q` positions recomputes at most `q * (2 + window)`, and `q`
            more where logits point to the next position.
    """

    quota: Quota = Quota()
    window: int = 4
    refresh: int = 2
    packed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.window < 0 or self.refresh < 1:
            raise ValueError(f"window, refresh: got {self.window}, {self.refresh}, take 0 or more and 1 or more")

    @property
    def sizes(self) -> tuple[int | None, ...]:       # type: ignore[override]
        return (*self.packed, None)

    def stale(self, view: View, memory: Memory) -> Array:
        return (view.refreshed < 0) | (view.step % self.refresh == 0)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        order = rank(Random(once=True)(view, None, None), view.masked)
        chosen = view.masked & (order < self.quota.count(view)[:, None])
        place = jnp.arange(_text(view).open.shape[1], dtype=jnp.int32)
        open = _text(view).open & (place < view.end[:, None])
        taken = paste(jnp.zeros(open.shape, bool), chosen, view.start)
        taken = with_left(taken, left) | _decided(view, view.round - 1)

        def around(i: Array, taken: Array) -> Array:
            this = chosen & (order == i)
            centre = jnp.where(this, view.positions, 0).sum(1)[:, None]
            turn = 2 * jnp.abs(place - centre) - (place < centre)
            near = open & ~taken
            return taken | (near & (rank(-turn, near) < self.window) & this.any(1)[:, None])

        return scattered(lax.fori_loop(0, chosen.sum(1).max(), around, taken) if self.window else taken)


def _text(view: View) -> Text:
    assert view.text is not None
    return view.text


def scattered(live: Array) -> Nodes:
    """The positions of the text that are `live` (`bool[B, N]`)."""
    positions = jnp.broadcast_to(jnp.arange(live.shape[1], dtype=jnp.int32), live.shape)
    return Nodes(positions=positions, live=live, own=jnp.ones(live.shape, bool))


def with_left(these: Array, left: int) -> Array:
    """Also the `left` positions before each."""
    for _ in range(left):
        these = these | jnp.pad(these[:, 1:], ((0, 0), (0, 1)))
    return these


def _decided(view: View, since: Array) -> Array:
    """`bool[B, N]`: what was decided in the given round (`i32[B]`) or later."""
    when = _text(view).when
    return (when >= 0) & (when >= since[:, None])
