"""Cache rules for samplers that work block by block: no cache, and exact caches of finished blocks.

The caches of single papers are in files named after them, here and in `decodax.algorithms.diffusion.samplers`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, BlockCausal, Nodes
from decodax.algorithms.diffusion.policies import Caching, Memory
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.view import View, span


@dataclasses.dataclass(frozen=True)
class NoCache(Caching):
    """Stores nothing: every forward pass computes the whole text."""

    narrow = False


@dataclasses.dataclass(frozen=True)
class BlockCache(Caching):
    """Exact cache of finished blocks, for block-causal and causal models (SDAR, Fast-dLLM v2, LLaDA 2, DiffusionGemma).

    When a block is decided, one more forward pass writes the entries of its final tokens; then the tokens are emitted.
    The prompt of a block-causal model is written by one wide forward pass, that of a causal model by the prefill.
    """

    persists = True

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return (view.kept == 0) & (view.start > 0)

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return (positions < final[:, None]) & ~valid


@dataclasses.dataclass(frozen=True)
class FusedCache(BlockCache):
    """Exact cache of finished blocks without extra forward passes (SDLM, SBD).

    The final tokens of a block are computed once more together with the next block, in a forward pass of twice the
    width.
    """

    fused = True

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        W = view.positions.shape[1]
        last, region = span(view, W, 0), span(view, left, W)
        last = last.replace(live=last.live & (last.positions >= view.kept[:, None]), own=jnp.zeros_like(last.own))
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), last, region)


def blocks(adapter: Adapter, block_length: int | None, default: int = 32) -> tuple[Blocks, Caching]:
    """Returns block windows, and the exact cache that the model's attention allows.

    Args:
        adapter: describes how the model processes a canvas.
        block_length: number of positions of a block. None: the number with which a block-causal model was trained, or
            `default`.
        default: number of positions of a block for other models.

    Raises:
        ValueError: `block_length` differs from the number with which a block-causal model was trained.
    """
    attention = adapter.attention
    if isinstance(attention, BlockCausal):
        if block_length not in (None, attention.block):
            raise ValueError(f"block_length: got {block_length}, the model was trained with blocks of "
                             f"{attention.block}")
        return Blocks(attention.block, aligned=True), BlockCache()
    return Blocks(block_length or default), BlockCache() if attention.causal else NoCache()
