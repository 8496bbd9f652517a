"""Cache rules for samplers that work block by block: no cache, Fast-dLLM's prefix and dual caches, exact caches of
finished blocks, and a cache inside a block."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.policies import Caching, Memory, Seen, View, span
from decodax.algorithms.diffusion.rules.unmasking import current, number
from decodax.core.window import take


@dataclasses.dataclass(frozen=True)
class NoCache(Caching):
    """No cache: every forward scores the whole text."""

    narrow = False


@dataclasses.dataclass(frozen=True)
class DualCache(Caching):
    """Fast-dLLM's dual cache (Wu et al. 2025): one wide forward when a block begins; its entries of all other positions
    are read until the block is done.

    Attributes:
        refresh: a wide forward also after this many steps; with 1 each forward is wide, as without a cache.
        anchored: where logits point to the next position, do not recompute the position before the block, which
            predicts the block's first token. Wide forwards must then unmask that token (Fast-dLLM's code for Dream; see
            `Anchored`).
    """

    refresh: int | None = None
    anchored: bool = False
    approximate = True

    def __post_init__(self) -> None:
        if self.refresh is not None and self.refresh < 1:
            raise ValueError(f"refresh: got {self.refresh}, takes 1 or more")

    def stale(self, view: View, memory: Memory) -> Array:
        begins = (view.step == 0) | (view.refreshed < 0)
        return begins if self.refresh is None else begins | (view.round - view.refreshed >= self.refresh)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, 0 if self.anchored else left, view.positions.shape[1])

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return ~valid       # in wide rounds everything, in narrow ones nothing


@dataclasses.dataclass(frozen=True)
class PrefixCache(DualCache):
    """Fast-dLLM's prefix cache: a narrow forward recomputes the block and what follows it.

    Attributes:
        suffix: the number of positions, from the block's start on, that are recomputed. In the published rule it is at
            least the number of new tokens. The entries of all positions behind them are read from the cache.
    """

    suffix: int = 256

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, 0 if self.anchored else left, max(self.suffix, view.positions.shape[1]))


@dataclasses.dataclass(frozen=True)
class BlockCache(Caching):
    """The exact cache of block-causal and causal models: when a block is done, one more forward writes the entries of
    its final tokens, and then the tokens are emitted (SDAR, Fast-dLLM v2, LLaDA 2, DiffusionGemma). The prompt of a
    block-causal model is written by one wide forward, that of a causal model by the prefill."""

    persists = True

    def stale(self, view: View, memory: Memory) -> Array:
        return (view.kept == 0) & (view.start > 0)

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return (positions < final[:, None]) & ~valid


@dataclasses.dataclass(frozen=True)
class FusedCache(BlockCache):
    """`BlockCache` without additional forwards: final tokens are scored once more beside the next block, in a window
    that is twice as wide (SDLM, SBD)."""

    fused = True

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        W = view.positions.shape[1]
        last, region = span(view, W, 0), span(view, left, W)
        last = last.replace(live=last.live & (last.positions >= view.kept[:, None]), own=jnp.zeros_like(last.own))
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), last, region)


@dataclasses.dataclass(frozen=True)
class AnchorCache(BlockCache):
    """Fast-dLLM v2's exact cache (Wu et al. 2025): the forward over a finished block, which writes its entries, also
    predicts the next block's first token where logits point to the next position. All other forwards score the current
    block only, without the token before it. Use it with the unmasking rule `Anchored`, which makes the wide forward of
    the prompt unmask that first token only."""

    fused = True

    def stale(self, view: View, memory: Memory) -> Array:
        return view.start - view.kept > view.positions.shape[1]

    def _stores(self, view: View) -> Array:
        """`bool[R]`: rows whose next forward is over the block before the current one."""
        return view.kept < view.start

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        W = view.positions.shape[1]
        nodes = span(view, 0, W)
        positions = nodes.positions - jnp.where(self._stores(view), W, 0)[:, None]
        live = (positions >= view.kept[:, None]) & (positions < view.end[:, None])
        return nodes.replace(positions=positions, live=live)


@dataclasses.dataclass(frozen=True)
class SubBlockCache(AnchorCache):
    """Fast-dLLM v2's cache inside a block (Wu et al. 2025): forwards score the whole block until the sub-block's first
    token is decided. Afterwards they score the sub-block only and read the entries that the last such forward wrote for
    the rest of the block. Finished blocks are exact. Each row changes over by itself, where the authors' code waits for
    all rows.

    The memory is the block (its first position, `i32[B]`) that a forward over the whole of it has written.

    Attributes:
        sub: positions of a sub-block, as in `SubBlocks`.
    """

    sub: int = 8
    approximate = True

    @property
    def sizes(self) -> tuple[int | None, ...]:       # type: ignore[override]
        return (self.sub, None)

    def init(self, view: View) -> Memory:
        return jnp.full(view.start.shape, -1, jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        # a forward that stores is over the block before, or a wide one, which may have decided the first token itself
        blind = self._stores(before) & (~self.stale(before, memory) | before.masked[:, 0])
        return jnp.where(self._whole(before, memory) & ~blind, before.start, memory)

    def _whole(self, view: View, memory: Memory) -> Array:
        """`bool[R]`: rows whose next forward is over a whole block, the current one or the one before it."""
        first = jnp.minimum(current(view, self.sub) * self.sub, view.positions.shape[1] - 1)
        begins = self._stores(view) | (memory != view.start) | ~view.masked.any(1)
        return begins | take(view.masked, first[:, None])[:, 0]

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        nodes = super().nodes(view, left, memory)
        ours = number(view, self.sub) == current(view, self.sub)[:, None]
        return nodes.replace(live=nodes.live & (self._whole(view, memory)[:, None] | ours))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return self._whole(view, memory)[:, None] & (positions >= view.kept[:, None])
