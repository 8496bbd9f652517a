"""dInfer: hierarchical and credit decoding, and a cache that refreshes the vicinity of a block ("dInfer: An Efficient
Inference Framework for Diffusion Language Models", Ma et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Memory, Shaper, Unmask
from decodax.algorithms.diffusion.rules.shapers import Past
from decodax.algorithms.diffusion.rules.unmasking import Threshold, reaches
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.samplers.fast_dllm import DualCache
from decodax.algorithms.diffusion.view import Seen, View, span
from decodax.common.options import Count, NonNegative, Range, Share
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS

PAPER = "dInfer: An Efficient Inference Framework for Diffusion Language Models"


@dataclasses.dataclass(frozen=True)
class Segments(Unmask):
    """Hierarchy decoder: unmasks all candidates with a probability above `threshold`. In each run of adjacent open
    positions it also unmasks the most confident one if its probability is above `low`; this divides the run."""

    threshold: float = 0.9
    low: float = 0.4

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        open, log_prob = view.active, jnp.where(view.active, seen.model.log_prob, -jnp.inf)
        begins = open & ~jnp.pad(open, ((0, 0), (1, 0)))[:, :-1]
        run = jnp.cumsum(begins, 1) - 1
        most = jax.vmap(lambda x, run: jax.ops.segment_max(x, run, open.shape[1])[run])(log_prob, jnp.maximum(run, 0))
        above = lambda bar: reaches(seen, "model", "confidence", bar, strict=True)
        return open & (above(self.threshold) | (log_prob == most) & above(self.low))


@dataclasses.dataclass(frozen=True)
class Credit(Shaper):
    """Credit decoding, after the authors' code: a token that is the likeliest in several steps earns credit.

    In each step, an open position's likeliest token earns its probability to the power `gamma`, older credit is
    multiplied by `beta`, and logits rise by `alpha * log(1 + credit)`. Of the published matrix `[B, W, V]`, only the
    `kept` tokens with the most credit at each position are stored. One token of a position earns credit in a step, so
    this is exact for the first `kept` steps, and as long as at most `kept` different tokens were the likeliest.
    """

    alpha: float = 0.7
    gamma: float = 0.2
    beta: float = 0.8
    kept: int = 8
    reads = 1

    def __post_init__(self) -> None:
        if self.kept < 2:
            raise ValueError(f"kept: got {self.kept}, takes 2 or more")

    def init(self, view: View) -> Memory:
        return Past.empty(view, self.kept)

    def _earned(self, memory: Past, token: Array, log_prob: Array, masked: Array) -> Past:
        new = jnp.where(masked, jnp.exp(self.gamma * log_prob), 0)
        old = self.beta * memory.amount
        own = (memory.ids == token[..., None]) & (old > 0)
        least = jnp.argmin(old, -1)
        at = jnp.where(own.any(-1), jnp.argmax(own, -1), least)[..., None] == jnp.arange(self.kept)
        at = at & masked[..., None]
        return Past(ids=jnp.where(at, token[..., None], memory.ids),
                    amount=jnp.where(at, new[..., None] + jnp.where(own, old, 0), old))

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        now = self._earned(memory, jnp.argmax(logits, -1).astype(jnp.int32),
                           logits.max(-1) - jax.nn.logsumexp(logits, -1), view.masked)
        return Past(now.ids, self.alpha * jnp.log1p(now.amount)).onto(logits)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Any:
        assert seen.likeliest is not None
        ids, log_probs = seen.likeliest
        now = self._earned(memory, ids[..., 0], log_probs[..., 0], before.masked)
        return now.unless(after.step == 0)


@dataclasses.dataclass(frozen=True)
class Vicinity(DualCache):
    """Vicinity refresh: Fast-dLLM's dual cache, whose narrow forward passes also recompute the positions around the
    block, since entries change most near tokens that were just decided.

    Attributes:
        before, after: number of recomputed positions before and after the block.
        warmup: number of first steps of the text that are wide, besides the one that fills the cache.
    """

    before: int = 16
    after: int = 16
    warmup: int = 0

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return super().needs_refresh(view, memory) | (view.round <= self.warmup)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        return span(view, max(left, self.before), view.positions.shape[1] + self.after)


@ALGORITHMS.register("dinfer-hierarchy", PAPER, "Ma et al. 2025", family="masked-diffusion", needs="a diffusion model")
def dinfer_hierarchy(lm: Any, threshold: Share = 0.9, low_threshold: Share = 0.4,
                     block_length: Count | None = None) -> MaskedDiffusion:
    """Unmasks all confident positions, and one in each run of adjacent open ones.

    The extra position divides its run, so that the next step has more context on both sides.

    Args:
        threshold: probability above which a candidate is unmasked.
        low_threshold: probability above which the most confident candidate of a run is unmasked.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    return MaskedDiffusion(adapter, windows, unmask=Segments(threshold, low_threshold), caching=caching)


@ALGORITHMS.register("dinfer-credit", PAPER, "Ma et al. 2025", family="masked-diffusion", needs="a diffusion model")
def dinfer_credit(lm: Any, threshold: Share = 0.9, alpha: NonNegative = 0.7, gamma: NonNegative = 0.2,
                  beta: NonNegative = 0.8, kept: Annotated[int, Range(2)] = 8,
                  block_length: Count | None = None) -> MaskedDiffusion:
    """Unmasks all confident positions; a token that is the likeliest in several steps counts as more confident.

    Args:
        threshold: minimum probability of a candidate that is unmasked.
        alpha: weight of the credit in the logits.
        gamma: the credit that a token earns is its probability to this power.
        beta: factor by which credit decays in each step.
        kept: number of tokens of a position for which credit is stored.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    return MaskedDiffusion(adapter, windows, unmask=Threshold(threshold, slack=1e-5), caching=caching,
                           shaper=Credit(alpha, gamma, beta, kept))


@ALGORITHMS.register("dinfer-vicinity", PAPER, "Ma et al. 2025", family="diffusion-cache", needs="a diffusion model")
def dinfer_vicinity(lm: Any, block_length: Count = 32, threshold: Share = 0.9, prefix_look: WholeNumber = 16,
                    after_look: WholeNumber = 16, warmup_steps: WholeNumber = 0) -> MaskedDiffusion:
    """Unmasks all confident positions at once, with a dual cache that also recomputes the positions around the block.

    Closer to decoding without a cache than Fast-dLLM's dual cache. If the `warmup_steps` end after the first block, the
    authors' code computes the whole text twice more, here once.

    Args:
        block_length: number of positions of a block.
        threshold: minimum probability of a candidate that is unmasked.
        prefix_look: number of positions before the block that are recomputed.
        after_look: number of positions after the block that are recomputed.
        warmup_steps: number of first steps that compute the whole text.
    """
    return MaskedDiffusion(Adapter.of(lm), Blocks(block_length), unmask=Threshold(threshold, slack=1e-5),
                           caching=Vicinity(before=prefix_look, after=after_look, warmup=warmup_steps))
