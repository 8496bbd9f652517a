"""dKV-Cache: a token's entries are cached one step after the token was decided ("dKV-Cache: The Cache for Diffusion
Language Models", Ma et al., 2025).

A token's own embedding changes most in the step that decides it, so its entries are computed once more. Wide forward
passes refresh all entries every few steps. The cache is approximate.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.rewriting import Rewriting, scattered, with_left
from decodax.algorithms.diffusion.canvas import paste
from decodax.algorithms.diffusion.policies import Memory
from decodax.algorithms.diffusion.rules.scores import Confidence, Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.stats import rank
from decodax.algorithms.diffusion.view import View, WholeText
from decodax.common.options import Count
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class DelayedTokens(Rewriting):
    """dKV-Cache-Decode: a narrow forward pass recomputes the open positions, and those that the last step decided.

    If logits predict the next position, the positions before open ones count as open, as in the authors' variant for
    Dream. Wide forward passes, over the whole text, are those of the authors' code for LLaDA: the first `1 + delay`
    steps of a window, and every step whose number is a multiple of `refresh`.

    Attributes:
        delay: number of steps in which a decided token is recomputed. 0: its entry is still that of the mask token.
            None: until the next wide forward pass.
        refresh: number of steps from one wide forward pass to the next; None: only the first ones of a window are wide.
        packed: sizes of narrow forward passes, ascending. Live nodes are gathered into the smallest size that fits. If
            none fits, the forward pass is as long as the text.
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

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        first = (view.step <= (self.delay or 0)) | (view.refreshed < 0)
        return first if self.refresh is None else first | (view.step % self.refresh == 0)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        since = view.refreshed if self.delay is None else view.round - self.delay
        return scattered(with_left(_text(view).open, left) | _decided(view, since))


@dataclasses.dataclass(frozen=True)
class DKVCacheGreedy(Rewriting):
    """dKV-Cache-Greedy: recomputes only the positions that this step and the last one decide, and the open positions
    nearest to those that this step decides.

    These positions must be known before the forward pass: the sampler's score has to be `Random(once=True)`, and its
    unmasking rule this `quota`.

    Attributes:
        quota: the sampler's unmasking rule, which determines the positions that the step decides.
        window: number of open positions recomputed for each decided one: the nearest, alternately on its left and
            right.
        refresh: every step of the window whose number is a multiple of this has a forward pass over the whole text.
        packed: sizes of the other forward passes, see `DelayedTokens`. A step that unmasks `q` positions recomputes at
            most `q * (2 + window)`, and `q` more if logits predict the next position.
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

    def needs_refresh(self, view: View, memory: Memory) -> Array:
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


def _text(view: View) -> WholeText:
    assert view.text is not None
    return view.text


def _decided(view: View, since: Array) -> Array:
    """Returns the positions that were decided in the round `since` (`i32[B]`) or later, `bool[B, N]`."""
    when = _text(view).when
    return (when >= 0) & (when >= since[:, None])


@ALGORITHMS.register("dkv-cache", "dKV-Cache: The Cache for Diffusion Language Models", "Ma et al. 2025",
                     family="diffusion-cache", needs="a diffusion model")
def dkv_cache(lm: Any, variant: Literal["decode", "greedy"] = "decode", block_length: Count = 32,
              steps: Count | None = None, cache_steps: Count | None = None, window_size: WholeNumber = 4,
              packed: tuple[Count, ...] | None = None) -> MaskedDiffusion:
    """LLaDA's sampler with a cache in which a token's entries are stored one step after the token was decided.

    For models with attention in both directions. "greedy" computes less and decides in random order.

    Args:
        variant: "decode" or "greedy", as in the paper.
        block_length: number of positions of a block.
        steps: number of steps of a block. None: one position per step.
        cache_steps: number of steps from one forward pass over the whole text to the next. None: 8, and 2 for "greedy".
        window_size: number of open positions that "greedy" recomputes for each position that it decides.
        packed: sizes of narrow forward passes, ascending. None: 64 and 128 for "decode"; for "greedy", the maximum that
            a step needs.
    """
    adapter, quota = Adapter.of(lm), Quota(steps)
    if variant == "greedy":
        most = (-(-block_length // steps) if steps else 1) * (2 + window_size + adapter.shift)
        greedy = DKVCacheGreedy(quota, window_size, cache_steps or 2, (most,) if packed is None else packed)
        return MaskedDiffusion(adapter, Blocks(block_length), Random(once=True), quota, caching=greedy)
    return MaskedDiffusion(adapter, Blocks(block_length), Confidence(), quota,
                           caching=DelayedTokens(1, cache_steps or 8, (64, 128) if packed is None else packed))
