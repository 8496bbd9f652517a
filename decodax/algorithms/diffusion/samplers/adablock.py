"""AdaBlock-dLLM: blocks that end at a delimiter, such as the end of a line ("AdaBlock-dLLM: Semantic-Aware Diffusion
LLM Inference via Adaptive Block Size", Lu et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.policies import BudgetSized, Caching, Memory, Unmask, Windows
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Threshold
from decodax.algorithms.diffusion.samplers.fast_dllm import DualCache, PrefixCache
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Share, TokenId
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Delimited(BudgetSized, Windows):
    """Blocks that end with a delimiter, as in the authors' code.

    In a block's first step, the delimiters are searched among the candidates of the next positions, a share `share` of
    the text's new positions. The most confident delimiter ends the block if its probability is at least `threshold`;
    otherwise the block has `block` positions. The memory is the block's length, `i32[B]`. The window has the width of
    the longest possible block.

    Attributes:
        delimiters: ids of the tokens that may end a block.
        threshold: minimum probability of a delimiter that ends a block.
        block: number of positions of a block without a delimiter.
        share: share of the text that is searched, and width of the window as a share of `size`.
        size: maximum number of new tokens of a text; None: the largest budget of the call.
    """

    delimiters: tuple[int, ...]
    threshold: float = 0.3
    block: int = 32
    share: float = 0.25
    size: int | None = None
    align = None

    def __post_init__(self) -> None:
        if not self.delimiters:
            raise ValueError("delimiters: got none, takes token ids")
        for name, value in (("block", self.block), ("size", self.size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, takes 1 or more")

    @property
    def width(self) -> int:
        return max(int(self.known_size * self.share), self.block)

    def _length(self, view: View, seen: Seen) -> Array:
        """Returns the length of a block that begins now, `i32[R]`."""
        text = (view.end - view.prompt_length).astype(jnp.float32)
        searched = view.inside & (view.positions - view.start[:, None] < jnp.floor(text * self.share)[:, None])
        found = searched & seen.reached & (seen.token[..., None] == jnp.array(self.delimiters, jnp.int32)).any(-1)
        prob = jnp.where(found, seen.model.prob, -1)
        return jnp.where(prob.max(1) >= self.threshold, jnp.argmax(prob, 1).astype(jnp.int32) + 1, self.block)

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.start.shape, jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return jnp.where(before.step == 0, self._length(before, seen), memory)

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        length = jnp.where(view.step == 0, self._length(view, seen), memory)
        return view.masked & (view.positions - view.start[:, None] < length[:, None])

    def finished(self, view: View, memory: Memory) -> Array:
        # decided positions after the block were given
        run = jnp.cumprod(~view.open & view.inside, 1).sum(1).astype(jnp.int32)
        return jnp.where((view.active & view.masked).any(1), 0, run)


@dataclasses.dataclass(frozen=True)
class OwnBlock(DualCache):
    """Dual cache for blocks of different lengths: a narrow forward pass recomputes the block, instead of the whole
    window in which its end was searched.

    Attributes:
        windows: the sampler's `Delimited` rule, whose memory of block lengths is kept here a second time.
    """

    windows: Any = None

    def with_length(self, budget: int) -> OwnBlock:
        """Returns the rule with windows for texts of `budget` new tokens."""
        return dataclasses.replace(self, windows=self.windows.with_length(budget))

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


@ALGORITHMS.register("adablock", "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size",
                     "Lu et al. 2025", family="masked-diffusion", needs="a diffusion model")
def adablock(lm: Any, delimiters: tuple[TokenId, ...] | None = None, delimiter_threshold: Share = 0.3,
             block_length: Count = 32, threshold: Share = 0.9, cache: Literal["none", "prefix", "dual"] = "none",
             suffix: Count = 256, size: Count | None = None) -> MaskedDiffusion:
    """Fills blocks that end at the end of a line, all confident positions at once.

    With a cache, a model whose logits predict the next position decides as in the authors' code for Dream; see
    `Anchored`.

    Args:
        delimiters: ids of the tokens that may end a block. None: the newline.
        delimiter_threshold: minimum probability of a delimiter that ends a block.
        block_length: number of positions of a block if no delimiter is found.
        threshold: minimum probability of a candidate that is unmasked.
        cache: Fast-dLLM's "prefix" or "dual" cache, or "none".
        suffix: number of positions that the prefix cache recomputes, from the block's start on.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    if delimiters is None:
        delimiters = tuple(lm.tokenizer.encode_after(None, "\n")) if lm.tokenizer else ()
        if len(delimiters) != 1:
            raise ValueError(f"delimiters: got None, and the newline is {len(delimiters)} tokens; takes token ids")
    adapter = Adapter.of(lm)
    windows = Delimited(tuple(delimiters), delimiter_threshold, block_length, size=size)
    anchored = adapter.shift and cache != "none"
    caching: Caching = {"dual": OwnBlock(anchored=anchored, windows=windows), "none": NoCache(),
                        "prefix": PrefixCache(anchored=anchored, suffix=suffix)}[cache]
    unmask: Unmask = Threshold(threshold)
    return MaskedDiffusion(adapter, windows, unmask=Anchored(unmask) if anchored else unmask, caching=caching)
