"""Approximate caches that refresh some entries: those around the block, those of recently decided tokens, or none.

Under attention in both directions every entry of the cache becomes stale with each unmasked token. These rules need no
training. They differ in which positions a narrow forward recomputes, and in when a wide forward refreshes all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.caching.blocks import DualCache
from decodax.algorithms.diffusion.canvas import paste
from decodax.algorithms.diffusion.policies import Caching, Memory, Seen, Text, View, span
from decodax.algorithms.diffusion.rules.scores import Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.stats import rank


@dataclasses.dataclass(frozen=True)
class Vicinity(DualCache):
    """dInfer's vicinity refresh (Ma et al. 2025): Fast-dLLM's dual cache, except that narrow forwards also recompute
    the positions around the block, since entries change most near tokens that were just decided.

    Attributes:
        before, after: the number of recomputed positions on either side of the block.
        warmup: the number of first steps of the text that are wide, besides the one that fills the cache.
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
    """The dual cache of blocks of different lengths (AdaBlock, Lu et al. 2025): a narrow forward recomputes the block,
    not the whole region in which its end was searched.

    Attributes:
        windows: the sampler's `Delimited` rule. The block lengths that it remembers are kept here a second time.
    """

    windows: Any = None

    def fit(self, budget: int) -> OwnBlock:
        """The rule with windows for texts of `budget` new tokens."""
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
    """A cache into which every forward writes the entries that it computed."""

    approximate = True

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return jnp.ones(positions.shape, bool)


@dataclasses.dataclass(frozen=True)
class Frozen(Rewriting):
    """FreeCache (FlashDLM, Hu et al. 2025): one wide forward at the beginning, and no other. A narrow forward
    recomputes the region and what follows it. Once the region has moved past a position, its entry stays as the last
    forward computed it; for tokens that were unmasked last this was from their mask tokens.

    Attributes:
        suffix: the number of positions, from the region's start on, that are recomputed; entries of positions behind
            them are read from the cache.
        before: the number of positions before the region that are recomputed too, and frozen later (FlashDLM's sliding
            window).
        near: positions behind the suffix are seen by the first forward only.
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
    """dKV-Cache-Decode (Ma et al. 2025): a token's entries enter the cache one step after it was decided, since its own
    embedding changes most in that step. A narrow forward recomputes the open positions, in the region and behind it,
    and those that the last step decided. With logits that point to the next position, the positions before open ones
    count as open, as in the authors' variant for Dream.

    Wide forwards are those of the authors' code for LLaDA: the first `1 + delay` steps of a region, and every step
    whose number is a multiple of `refresh`.

    Attributes:
        delay: the number of steps in which a decided token is recomputed. 0: its entry stays that of the mask token.
            None: until the next wide forward.
        refresh: steps from one wide forward to the next; None: only the region's first ones are wide.
        packed: sizes of narrow rounds, ascending: live nodes are gathered into the smallest size that fits. If none
            fits, the narrow round is as long as the text.
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
    that the last step decided, and the open positions nearest to the former. It must know these positions beforehand:
    the sampler's score has to be `Random(once=True)`, and its unmasking rule this `quota`.

    Attributes:
        quota: the sampler's unmasking rule, which says what the step decides.
        window: how many open positions are recomputed for each of them: the nearest ones, alternately on its left and
            right.
        refresh: a wide forward in every step of the region whose number is a multiple of this.
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
    """The same positions and the `left` positions before each of them."""
    for _ in range(left):
        these = these | jnp.pad(these[:, 1:], ((0, 0), (0, 1)))
    return these


def _decided(view: View, since: Array) -> Array:
    """`bool[B, N]`: what was decided in the given round (`i32[B]`) or later."""
    when = _text(view).when
    return (when >= 0) & (when >= since[:, None])
