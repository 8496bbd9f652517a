"""D2F: a pipeline of blocks, in which a block is begun before the one before it is finished ("Diffusion LLMs Can Do
Faster-Than-AR Inference via Discrete Diffusion Forcing", Wang et al., 2025).

`BlockPipeline` determines when a block is begun, `Pipelined` the candidates that are unmasked in blocks with incomplete
context. The rules are those of the authors' code. `BlockPipeline(add=1, full=1)` is `Blocks`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Full, PromptBlocks
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache, NoCache, blocks
from decodax.algorithms.diffusion.policies import Memory, Unmask
from decodax.algorithms.diffusion.rules.unmasking import Threshold, best
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class BlockPipeline(Blocks):
    """Blocks of `block` positions, at most `most` of them at a time. The window begins with the first unfinished block.

    A block is added when the share `add` of the block before it is decided, and becomes fully active when that share
    reaches `full`. The authors add blocks without a bound; with `most` at least the number of blocks of the text, this
    is the published rule.

    Attributes:
        add: share of decided positions at which the next block is added, above 0.
        full: share at which the next block is fully active; used by `Pipelined` only.
        most: maximum number of blocks in a round.
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
        """Returns how many of the positions marked in `positions` (`bool[R, W]`) are in each block of the window:
        `i32[R, most]`."""
        return positions.reshape(-1, self.most, self.block).sum(2, dtype=jnp.int32)

    def decided(self, view: View, share: float) -> Array:
        """Returns for each block of the window whether at least the share `share` (from 0 to 1) of the block before it
        is decided, `bool[R, most]`; True for the first block."""
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
    """Unmasks the candidates of `rule` in any block, and in each fully active block without such a candidate the one
    with the best score.

    Attributes:
        rule: an unmasking rule.
        windows: the pipeline to which the blocks belong.
        force: the fully active blocks in which a candidate is unmasked in any case: "each" of them (D2F), or only the
            "first" one with open positions (d3LLM).
    """

    rule: Any
    windows: BlockPipeline
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


def pipeline(adapter: Adapter, block_length: int | None, add: float, full: float, most: int) -> BlockPipeline:
    """Returns the windows rule of D2F for a model.

    Args:
        adapter: describes the model.
        block_length: number of positions of a block; None: the model's, or 32.
        add, full, most: see `BlockPipeline`.
    """
    windows, _ = blocks(adapter, block_length)
    return BlockPipeline(windows.block, windows.aligned, add, full, most)


@ALGORITHMS.register("d2f", "Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing",
                     "Wang et al. 2025", family="masked-diffusion", needs="a diffusion model")
def d2f(lm: Any, skip_threshold: Share = 0.9, block_add_threshold: Share = 0.1, decoded_token_threshold: Share = 0.95,
        most: Count = 8, block_length: Count | None = None) -> MaskedDiffusion:
    """Fills several blocks at once, the later ones with incomplete context, with an exact block cache.

    The authors' models are LLaDA and Dream, fine-tuned so that a position attends only to blocks up to its own, with
    the prompt as one block. Therefore a model whose checkpoint has full attention is run with that pattern. A
    block-causal model keeps its own blocks.

    Args:
        skip_threshold: probability above which a candidate is unmasked.
        block_add_threshold: share of decided positions of a block at which the next one is added.
        decoded_token_threshold: share of decided positions of a block at which the next one is fully active.
        most: maximum number of blocks at a time; the authors set no bound.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows = pipeline(adapter, block_length, block_add_threshold, decoded_token_threshold, most)
    if isinstance(adapter.attention, Full):
        adapter = dataclasses.replace(adapter, attention=PromptBlocks(windows.block))
    return MaskedDiffusion(adapter, windows, unmask=Pipelined(Threshold(skip_threshold, strict=True), windows),
                           caching=NoCache() if adapter.attention.causal else FusedCache())
