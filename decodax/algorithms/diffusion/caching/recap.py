"""ReCAP: masked generation with occasional full steps, and cheap local steps between them ("Plug-and-Play Context
Feature Reuse for Efficient Masked Generation", Liu et al., 2025).

A full step computes the whole text and chooses the targets, the positions that it and the following local steps decide:
the number that their quotas add up to, in the order of its scores. A local step computes only the targets, attends to
the entries that the full step wrote for all other positions, and decides the next targets. The cache is approximate.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.rewriting import Rewriting, scattered, with_left
from decodax.algorithms.diffusion.canvas import paste
from decodax.algorithms.diffusion.policies import Memory, Score
from decodax.algorithms.diffusion.rules.scores import Confidence, Noisy, Random
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.stats import rank
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, NonNegative
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Turns:
    """ReCAP's schedule of full steps: the first `lead` steps of a window are full, and then every `every`-th, beginning
    with step `lead` (counted from 0). The others are local."""

    every: int = 2
    lead: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.lead < 0:
            raise ValueError(f"every, lead: got {self.every}, {self.lead}, take 1 or more and 0 or more")

    def full(self, step: Array) -> Array:
        """Returns whether step number `step` of each row's window (`i32[R]`, from 0) is a full one: `bool[R]`."""
        return (step < self.lead) | ((step - self.lead) % self.every == 0)


@dataclasses.dataclass(frozen=True)
class FullStepOrder(Score):
    """A score that is computed in full steps only: in local steps, positions keep the score of the last full step,
    which is the rule's memory, `f32[B, W]`.

    Attributes:
        score: the score that is computed in full steps.
        turns: determines which steps are full.
    """

    score: Any
    turns: Turns

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.positions.shape, jnp.float32)

    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        return jnp.where(self.turns.full(view.step)[:, None], self.score(view, seen, None), memory)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return self(before, seen, memory)


@dataclasses.dataclass(frozen=True)
class Targets(Rewriting):
    """ReCAP's cache: full steps are forward passes over the whole text, local steps compute the targets.

    The memory is the targets, `bool[B, W]`.

    Attributes:
        quota: number of positions that a step decides.
        score: order in which positions are decided.
        turns: determines which steps are full.
        packed: sizes of local forward passes, ascending. Live nodes are gathered into the smallest size that fits. If
            none fits, the forward pass is as long as the text.
    """

    quota: Quota = Quota()
    score: Any = Confidence()
    turns: Turns = Turns()
    packed: tuple[int, ...] = ()

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    @property
    def sizes(self) -> tuple[int | None, ...]:       # type: ignore[override]
        return (*self.packed, None)

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.positions.shape, bool)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        open, step = before.masked & seen.reached, before.step
        order = rank(self.score(before, seen, None), open)
        left, total, going = before, jnp.zeros_like(step), jnp.ones(step.shape, bool)
        for turn in range(self.turns.every):
            going = going & (~self.turns.full(step + turn) if turn else going)
            total = total + jnp.where(going, jnp.maximum(self.quota.count(left), 1), 0)
            left = before.replace(open=open & (order >= total[:, None]), step=step + turn + 1)
        return jnp.where(self.turns.full(step)[:, None], open & ~left.open, memory)

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return (view.refreshed < 0) | self.turns.full(view.step)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        assert view.text is not None
        return scattered(with_left(paste(jnp.zeros(view.text.open.shape, bool), memory, view.start), left))


@ALGORITHMS.register("recap", "Plug-and-Play Context Feature Reuse for Efficient Masked Generation", "Liu et al. 2025",
                     family="diffusion-cache", needs="a diffusion model")
def recap(lm: Any, steps: Count = 24, every: Count = 2, pre_full_iters: WholeNumber = 0,
          order: Literal["random", "confidence"] = "confidence", choice_temperature: NonNegative = 5.5,
          schedule: Literal["power", "cosine"] = "power", size: Count | None = None,
          packed: tuple[Count, ...] = ()) -> MaskedDiffusion:
    """MaskGIT's sampler whose full steps choose targets, and whose local steps compute only these.

    Halves the computation of a sampler that fills the whole text at once.

    Args:
        steps: number of steps, full and local.
        every: number of steps from one full step to the next (the authors' `num_cache_iters` plus 1).
        pre_full_iters: number of full steps at the beginning.
        order: "confidence", with Gumbel noise that fades, or "random" (MAR).
        choice_temperature: scale of that noise; 0: no noise.
        schedule: schedule of the quotas: "power" (the authors') or "cosine"; see `Quota`.
        size: maximum number of new tokens of a text. None: the budget of the call.
        packed: sizes of local forward passes, ascending. (): as long as the text.
    """
    turns, quota = Turns(every, pre_full_iters), Quota(steps, schedule)
    score: Score = Random() if order == "random" else \
        Noisy(Confidence("policy"), choice_temperature, steps) if choice_temperature else Confidence("policy")
    return MaskedDiffusion(Adapter.of(lm), Whole(size), FullStepOrder(score, turns), quota,
                           caching=Targets(quota, score, turns, packed))
