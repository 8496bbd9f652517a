"""Fast-dLLM v2: blocks that are filled in sub-blocks, with an exact cache of finished blocks ("Fast-dLLM v2: Efficient
Block-Diffusion LLM", Wu et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import BlockCache, blocks
from decodax.algorithms.diffusion.policies import Memory, Unmask
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Threshold, current, number
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.view import Seen, View, span
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.core.window import take


@dataclasses.dataclass(frozen=True)
class SubBlocks(Blocks):
    """Blocks that are filled in sub-blocks of `sub` positions from left to right."""

    sub: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sub <= self.block:
            raise ValueError(f"sub: got {self.sub}, takes 1 to the block of {self.block}")

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.masked & (number(view, self.sub) == current(view, self.sub)[:, None])


@dataclasses.dataclass(frozen=True)
class AnchorCache(BlockCache):
    """Exact cache: the forward pass over a finished block, which writes its entries, also predicts the next block's
    first token, if logits predict the next position.

    All other forward passes compute the current block only, without the token before it. Use it with the unmasking rule
    `Anchored`, with which the wide forward pass over the prompt unmasks only that first token.
    """

    fused = True

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return view.start - view.kept > view.positions.shape[1]

    def _stores(self, view: View) -> Array:
        """Returns rows whose next forward pass is over the block before the current one, `bool[R]`."""
        return view.kept < view.start

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        W = view.positions.shape[1]
        nodes = span(view, 0, W)
        positions = nodes.positions - jnp.where(self._stores(view), W, 0)[:, None]
        live = (positions >= view.kept[:, None]) & (positions < view.end[:, None])
        return nodes.replace(positions=positions, live=live)


@dataclasses.dataclass(frozen=True)
class SubBlockCache(AnchorCache):
    """Cache inside a block: forward passes compute the whole block until the sub-block's first token is decided.

    Afterwards they compute the sub-block only, and attend to the entries that the last such forward pass wrote for the
    rest of the block. Finished blocks are exact. Each row changes over by itself, while the authors' code waits for all
    rows.

    The memory is the first position of the last block that was computed as a whole, `i32[B]`.

    Attributes:
        sub: number of positions of a sub-block, as in `SubBlocks`.
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
        blind = self._stores(before) & (~self.needs_refresh(before, memory) | before.masked[:, 0])
        return jnp.where(self._whole(before, memory) & ~blind, before.start, memory)

    def _whole(self, view: View, memory: Memory) -> Array:
        """Returns rows whose next forward pass is over a whole block, the current one or the one before it,
        `bool[R]`."""
        first = jnp.minimum(current(view, self.sub) * self.sub, view.positions.shape[1] - 1)
        begins = self._stores(view) | (memory != view.start) | ~view.masked.any(1)
        return begins | take(view.masked, first[:, None])[:, 0]

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        nodes = super().nodes(view, left, memory)
        ours = number(view, self.sub) == current(view, self.sub)[:, None]
        return nodes.replace(live=nodes.live & (self._whole(view, memory)[:, None] | ours))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return self._whole(view, memory)[:, None] & (positions >= view.kept[:, None])


@ALGORITHMS.register("fast-dllm-2", "Fast-dLLM v2: Efficient Block-Diffusion LLM", "Wu et al. 2025",
                     family="masked-diffusion", needs="a diffusion model")
def fast_dllm_2(lm: Any, small_block_size: Count = 8, threshold: Share = 0.9,
                cache: Literal["block", "dual"] = "block") -> MaskedDiffusion:
    """Fills blocks in sub-blocks, all confident positions at once, with an exact block cache.

    For block-causal models. If logits predict the next position, as in the authors' models, a block's first token is
    the likeliest one in the forward pass that finishes the block before it.

    Args:
        small_block_size: number of positions of a sub-block.
        threshold: probability above which a candidate is unmasked.
        cache: "block" is exact for finished blocks; "dual" also caches inside a block (the authors' `use_block_cache`),
            which is approximate.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, None)
    small = min(small_block_size, windows.block)
    unmask: Unmask = Threshold(threshold, strict=True)
    exact = isinstance(caching, BlockCache) and not adapter.attention.causal
    if cache == "dual" and not exact:
        raise ValueError("cache: got 'dual', takes 'block'; the cache inside a block is for block-causal models")
    if exact:
        caching = SubBlockCache(sub=small) if cache == "dual" else AnchorCache()
        unmask = Anchored(unmask) if adapter.shift else unmask
    return MaskedDiffusion(adapter, SubBlocks(windows.block, windows.aligned, small), unmask=unmask, caching=caching)
