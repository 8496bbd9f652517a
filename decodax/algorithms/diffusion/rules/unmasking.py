"""Unmasking rules that several samplers share: quotas, thresholds, and combinations of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Memory, Stepped, Unmask
from decodax.algorithms.diffusion.rules.scores import Of
from decodax.algorithms.diffusion.stats import rank
from decodax.algorithms.diffusion.view import Seen, View

Measure = Literal["confidence", "margin", "entropy"]


def reaches(seen: Seen, of: Of, measure: Measure, value: float, strict: bool = False) -> Array:
    """Returns a mask of the candidates that are confident enough, `bool[R, W]`.

    Args:
        seen: the predictions.
        of: "model" or "policy", see `Of`.
        measure: "confidence" or "margin": the candidate's probability, or the margin, must be at least `value`.
            "entropy": the entropy in nats must be at most `value`.
        value: the threshold.
        strict: whether the measure must be above (for entropy below) `value`.
    """
    stats = seen.of(of)
    x, bar = {"confidence": (stats.log_prob, jnp.log(jnp.float32(value))), "margin": (stats.margin, jnp.float32(value)),
              "entropy": (-stats.entropy, jnp.float32(-value))}[measure]
    return x > bar if strict else x >= bar


def best(score: Array, among: Array, count: Array) -> Array:
    """Returns a mask of the best positions, `bool[R, W]`: of the positions `among` (`bool[R, W]`), the `count`
    (`i32[R]`) with the largest `score` (`f32[R, W]`)."""
    return among & (rank(score, among) < count[:, None])


def time(step: Array, steps: int, eps: float = 0.0) -> tuple[Array, Array]:
    """Returns the diffusion times before and after step number `step` (`i32[R]`, from 0) of `steps`, `f32[R]` each.
    Time falls linearly from 1 before the first step to `eps` after the last."""
    at = lambda i: 1 - (1 - eps) * jnp.minimum(i, steps).astype(jnp.float32) / steps
    return at(step), at(step + 1)


@dataclasses.dataclass(frozen=True)
class Quota(Stepped, Unmask):
    """Unmasks the candidates with the best scores; their number is given by a schedule.

    Attributes:
        steps: number of steps of a window; None: one position per step.
        schedule: "even": LLaDA's even split of the initially open positions over the steps; the first steps take the
            remainder. "width": the same split of the whole window, including the prompt's tokens in it (SDAR, LLaDA 2).
            "time": Dream's share `1 - s/t` of the positions that are still open, rounded down; all of them in the last
            step. The share may be less than one position: such a step unmasks nothing (with the published default of
            one step for each position, the first step). "cosine": MaskGIT's: `floor(opened * cos(pi/2 * i/steps))`
            positions are left after step `i` (from 1), but at least one before the last step. "power": ReCAP's: the
            decrease of `floor(opened * (1 - (i/steps)^2.5))` from step to step, at least one; all in the last step.
        eps: time at the end of the last step, for "time".
    """

    steps: int | None = None
    schedule: Literal["even", "width", "time", "cosine", "power"] = "even"
    eps: float = 1e-3

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")

    @property
    def patient(self) -> bool:
        return self.schedule == "time" and self.steps is not None

    def count(self, view: View) -> Array:
        """Returns the number of positions that the schedule unmasks in the step about to be taken, `i32[R]`; 1 if
        `steps` is None."""
        if self.steps is None:
            return jnp.ones_like(view.step)
        left = view.masked.sum(1, dtype=jnp.int32)
        if self.schedule in ("even", "width"):
            total = view.opened if self.schedule == "even" else jnp.full_like(view.step, view.positions.shape[1])
            return total // self.steps + (view.step < total % self.steps)
        if self.schedule == "cosine":
            return left - remaining(view, self.steps)
        if self.schedule == "power":
            at = lambda step: jnp.floor(view.opened * (1 - (step.astype(jnp.float32) / self.steps) ** 2.5))
            falls = jnp.maximum(at(view.step) - at(view.step + 1), 1).astype(jnp.int32)
            return jnp.where(view.step + 1 >= self.steps, left, falls)
        t, s = time(view.step, self.steps, self.eps)
        return jnp.where(view.step + 1 >= self.steps, left, (left * (1 - s / t)).astype(jnp.int32))

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return best(score, view.active, self.count(view))


def remaining(view: View, steps: int) -> Array:
    """Returns the number of undecided positions that MaskGIT's cosine schedule leaves in the window after the current
    step of `steps`, `i32[R]`: 0 after the last step, at least 1 before."""
    ratio = (view.step + 1).astype(jnp.float32) / steps
    left = jnp.maximum(jnp.floor(view.opened * jnp.cos(jnp.pi / 2 * ratio)).astype(jnp.int32), 1)
    return jnp.where(view.step + 1 >= steps, 0, left)


@dataclasses.dataclass(frozen=True)
class Threshold(Unmask):
    """Unmasks all candidates that are confident enough (Fast-dLLM's threshold, Wu et al., 2025; dParallel's by entropy,
    Chen et al., 2025).

    Attributes:
        value: the threshold.
        measure: "confidence", "margin" or "entropy", see `reaches`.
        of: "model" or "policy", see `Of`.
        strict: whether the measure must be above (for entropy below) the threshold.
        slack: for "confidence", the threshold is at most the largest probability minus this, so that candidates almost
            as confident as the best one are unmasked with it (dInfer's threshold decoder, 1e-5). None: the threshold is
            fixed.
    """

    value: float = 0.9
    measure: Measure = "confidence"
    of: Of = "model"
    strict: bool = False
    slack: float | None = None

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        sure = reaches(seen, self.of, self.measure, self.value, self.strict)
        if self.slack is None:
            return sure
        prob = jnp.where(view.active, seen.of(self.of).prob, -jnp.inf)
        return sure | (prob >= prob.max(1, keepdims=True) - self.slack)


@dataclasses.dataclass(frozen=True)
class All(Unmask):
    """Unmasks all undecided positions of the window in one step, each with its candidate."""

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return view.active


@dataclasses.dataclass(frozen=True)
class AtLeast(Unmask):
    """Unmasks the positions that `rule` chooses, if they are at least as many as those of the step's `quota`; otherwise
    the positions of the quota, with the best scores (SDAR's dynamic rule, LLaDA 2)."""

    rule: Any
    quota: Quota = Quota()

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.rule.of

    @property
    def longest(self) -> int:
        return max(self.rule.longest, self.quota.longest)

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        first, least = self.rule(view, seen, score, memory) & view.active, self.quota(view, seen, score, memory)
        return jnp.where((first.sum(1) >= least.sum(1))[:, None], first, least)


@dataclasses.dataclass(frozen=True)
class BlockQuota(Stepped, Unmask):
    """LLaDA's even quota for each block, in a window that is filled block by block (`WholeBlocks`). After the last of
    the steps, one position per step is unmasked.

    The memory is the step in which the block began and its number of positions then, `i32[B]` each, since the text may
    later end inside the block.

    Attributes:
        block: number of positions of a block.
        steps: number of steps of a block; None: one position per step.
    """

    block: int = 32
    steps: int | None = None

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.start.shape, jnp.int32), self._size(view)

    def _size(self, view: View) -> Array:
        here = number(view, self.block) == current(view, self.block)[:, None]
        return (here & view.editable & view.inside).sum(1, dtype=jnp.int32)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        same = current(before, self.block) == current(after, self.block)
        return jnp.where(same, memory[0], after.step), jnp.where(same, memory[1], self._size(after))

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        here = number(view, self.block) == current(view, self.block)[:, None]
        steps = self.block if self.steps is None else self.steps
        step, size = view.step - memory[0], memory[1]
        count = jnp.where(step < steps, size // steps + (step < size % steps), 1)
        return best(score, view.active & here, count)


def number(view: View, block: int) -> Array:
    """Returns the index of the block to which each window position belongs, `i32[R, W]`; the window's first block, of
    `block` positions, is 0."""
    return (view.positions - view.start[:, None]) // block


def current(view: View, block: int) -> Array:
    """Returns the index within the window of the first block that has undecided positions, `i32[R]`; the window's
    width, which is larger than any index, if there is none."""
    return jnp.where(view.masked, number(view, block), view.positions.shape[1]).min(1)


@dataclasses.dataclass(frozen=True)
class Anchored(Unmask):
    """In a window's first step, unmasks only the window's first position, whatever its confidence; in later steps, what
    the unmasking rule `rule` chooses.

    Fast-dLLM's code for Dream needs this, since its cached forward passes do not compute the position before a block,
    whose logits predict the block's first token. So does Fast-dLLM v2, where that token is predicted by the forward
    pass that finishes the block before.
    """

    rule: Any

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.rule.of

    @property
    def longest(self) -> int:
        return self.rule.longest

    @property
    def patient(self) -> bool:
        return self.rule.patient

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        first = view.active & (view.positions == view.start[:, None])
        return jnp.where((view.step == 0)[:, None] & first.any(1, keepdims=True), first,
                         self.rule(view, seen, score, memory))
