"""Unmasking rules: the candidates that are decided in a step, by quotas, thresholds, factors, entropy bounds, prefixes
or coins."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.policies import Counts, Memory, Seen, Unmask, View
from decodax.algorithms.diffusion.rules.scores import Of
from decodax.algorithms.diffusion.stats import rank
from decodax.core.keys import Purpose, uniforms

Measure = Literal["confidence", "margin", "entropy"]


def reaches(seen: Seen, of: Of, measure: Measure, value: float, strict: bool = False) -> Array:
    """`bool[R, W]`: the candidate's probability or margin is at least `value`, or its entropy at most `value`; with
    `strict` above or below it."""
    stats = seen.of(of)
    x, bar = {"confidence": (stats.log_prob, jnp.log(jnp.float32(value))), "margin": (stats.margin, jnp.float32(value)),
              "entropy": (-stats.entropy, jnp.float32(-value))}[measure]
    return x > bar if strict else x >= bar


def best(score: Array, among: Array, count: Array) -> Array:
    """`bool[R, W]`: the `count` (`i32[R]`) best positions."""
    return among & (rank(score, among) < count[:, None])


def time(step: Array, steps: int, eps: float = 0.0) -> tuple[Array, Array]:
    """The time at which a step of `steps` begins and ends, `f32[R]` each: it falls evenly from 1 to `eps`."""
    at = lambda i: 1 - (1 - eps) * jnp.minimum(i, steps).astype(jnp.float32) / steps
    return at(step), at(step + 1)


@dataclasses.dataclass(frozen=True)
class Quota(Counts, Unmask):
    """The best candidates by score, as many as a schedule says.

    Attributes:
        steps: of a region; None: one position a step.
        schedule: "even": LLaDA's split of the positions open at first, with the remainder in the first steps. "width":
            the same split of the whole region, including the prompt's tokens in it (SDAR, LLaDA 2). "time": Dream's
            share `1 - s/t` of the positions still open, rounded down; all of them in the last step. The share may be
            less than one position: such a step unmasks nothing (with as many steps as positions, the published default,
            the first step). "cosine": MaskGIT's: after step `i` (from 1) `floor(opened * cos(pi/2 * i/steps))`
            positions are left, but at least one before the last step. "power": ReCAP's: the decrease of `floor(opened *
            (1 - (i/steps)^2.5))` from step to step, at least one; all in the last step.
        eps: where time ends ("time").
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
        """`i32[R]`."""
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
    """`i32[R]`: positions that MaskGIT's cosine schedule leaves open after this step, one at least before the last."""
    ratio = (view.step + 1).astype(jnp.float32) / steps
    left = jnp.maximum(jnp.floor(view.opened * jnp.cos(jnp.pi / 2 * ratio)).astype(jnp.int32), 1)
    return jnp.where(view.step + 1 >= steps, 0, left)


@dataclasses.dataclass(frozen=True)
class Threshold(Unmask):
    """All candidates that are sure enough (Fast-dLLM's threshold, Wu et al. 2025; dParallel's by entropy, Chen et al.
    2025).

    Attributes:
        value, measure, of, strict: see `reaches`.
        slack: for "confidence": the threshold is at most the largest probability minus this, so that candidates almost
            as sure as the surest one are taken with it (dInfer's threshold decoder, 1e-5).
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
class Factor(Unmask):
    """Fast-dLLM's factor rule: the more candidates are unmasked at once, the surer each of them must be. Candidates are
    taken by falling confidence `c_r`, with rank `r` from 1, as long as the condition of the variant holds; the first
    one is always taken.

    Attributes:
        factor: `f`.
        variant: "a": `c_r >= 1 - f / (r + 1)`, as in the paper. "b": as the authors' code, which also takes the last of
            all open positions when it is the only one to fail. "c": `c_r > 1 - f / r`, looser.
    """

    factor: float = 1.0
    variant: Literal["a", "b", "c"] = "a"
    of: Of = "model"

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        stats = seen.of(self.of)
        order = rank(stats.log_prob, view.active)
        r = order + 1
        # 1 - p without rounding p to 1 first
        doubt = -jnp.expm1(stats.log_prob)
        sure = doubt * r < self.factor if self.variant == "c" else doubt * (r + 1) <= self.factor
        failed = view.active & ~sure & (order > 0)
        first = jnp.where(failed, order, view.open.shape[1]).min(1)
        count = view.active.sum(1, dtype=jnp.int32)
        if self.variant == "b":
            first = jnp.where(first == count - 1, count, first)
        return view.active & (order < jnp.maximum(first, 1)[:, None])


@dataclasses.dataclass(frozen=True)
class EntropyBound(Unmask):
    """Entropy-bounded unmasking (EB-sampler, Ben-Hamu et al. 2025): the longest list by falling score whose entropies,
    without the largest of them, sum to at most `bound`; so at least one is taken. `inclusive` counts the largest too
    (SDAR)."""

    bound: float = 0.1
    inclusive: bool = False
    of: Of = "model"

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        order = rank(score, view.active)
        entropy = jnp.where(view.active, seen.of(self.of).entropy, 0)
        listed = jnp.put_along_axis(jnp.zeros_like(entropy), order, entropy, 1, inplace=False)
        spent = jnp.cumsum(listed, 1) - (0 if self.inclusive else lax.cummax(listed, axis=1))
        return view.active & jnp.take_along_axis(spent <= self.bound, order, 1)


@dataclasses.dataclass(frozen=True)
class ConfidentPrefix(Unmask):
    """The candidates before the first one that is not sure enough (SDLM, Liu et al. 2025). With `Position` as the score
    the first open position is always taken."""

    value: float = 0.9
    measure: Measure = "confidence"
    of: Of = "model"
    strict: bool = False

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        sure = reaches(seen, self.of, self.measure, self.value, self.strict) | ~view.active
        return jnp.cumprod(sure, 1).astype(bool)


@dataclasses.dataclass(frozen=True)
class Ancestral(Counts, Unmask):
    """Ancestral sampling of the absorbing process (MDLM, Sahoo et al. 2024; Dream's "origin") over `steps` even steps
    of time from 1 to `eps`; the last step takes all that is left.

    In the step from t to s a position is unmasked with probability `1 - s/t`, independently of all others: that is, at
    a uniform random time. So each position draws its time at once. Steps in which no position's time comes would not
    change the canvas (MDLM's cached sampler skips their forward), so they are left out. With infinitely many steps this
    is first-hitting sampling: one position at a time, in random order (`Quota` by `Random`).
    """

    steps: int = 64
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        passed = uniforms(view.key, view.positions, Purpose.ACCEPT)[..., 0] / (1 - self.eps)
        falls = jnp.minimum((passed * self.steps).astype(jnp.int32), self.steps - 1)
        return view.active & (falls == jnp.where(view.active, falls, self.steps).min(1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Coins(Counts, Unmask):
    """A coin for each position and step, for processes that also remask tokens (ReMDM, Wang et al. 2025): in the step
    from time t to s a position is decided with probability `(a_s - (1 - sigma) a_t) / (1 - a_t)`, where `a` is the
    share of decided positions by the schedule, `1 - t` unless `remask` has its own. The last step decides all
    positions. A step may unmask nothing.

    Attributes:
        steps: of a region. remask: a `ReMDM` with the same steps, which gives sigma; None: sigma is 0.
    """

    steps: int = 64
    remask: Any = None
    patient = True

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        t, s = time(view.step, self.steps) if self.remask is None else self.remask.shares(view)
        sigma = 0.0 if self.remask is None else self.remask.scale(view)
        chance = ((1 - s) - (1 - sigma) * (1 - t)) / t
        coin = view.uniforms(Purpose.ACCEPT)[..., 0] < chance[:, None]
        return coin | (view.step + 1 >= self.steps)[:, None]


@dataclasses.dataclass(frozen=True)
class LocalLeap(Unmask):
    """Local determinism propagation (LocalLeap, Kong et al. 2025): candidates with a probability of at least `anchor`
    are unmasked, and candidates within `radius` of one of them with a probability of at least `relaxed`. Only open
    positions of the block are anchors, as in the authors' code."""

    anchor: float = 0.9
    relaxed: float = 0.75
    radius: int = 4

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError(f"radius: got {self.radius}, takes 0 or more")
        if not 0 < self.relaxed <= self.anchor:
            raise ValueError(f"relaxed: got {self.relaxed}, takes more than 0 up to the anchor of {self.anchor}")

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        anchors = view.active & reaches(seen, "model", "confidence", self.anchor)
        near = lax.reduce_window(anchors, False, lax.bitwise_or, (1, 2 * self.radius + 1), (1, 1), "SAME")
        return anchors | near & reaches(seen, "model", "confidence", self.relaxed)


@dataclasses.dataclass(frozen=True)
class Segments(Unmask):
    """dInfer's hierarchy decoder (Ma et al. 2025): all candidates above `threshold`, and in each run of adjacent open
    positions the surest one if it is above `low`; it divides the run."""

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
class All(Unmask):
    """All candidates."""

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return view.active


@dataclasses.dataclass(frozen=True)
class AtLeast(Unmask):
    """The candidates that `rule` unmasks if they are as many as the step's quota or more, else the quota (SDAR's
    dynamic rule, LLaDA 2)."""

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
class BlockQuota(Counts, Unmask):
    """LLaDA's even quota for each block of a region that is filled block by block (`WholeBlocks`): `steps` a block,
    with the remainder in the first steps; one position a step beyond them.

    The memory is the step in which the block began and its positions then, `i32[B]` each, since the text may come to
    end inside the block later.
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
    """`i32[R, W]`: the number of the block of the region that a position lies in."""
    return (view.positions - view.start[:, None]) // block


def current(view: View, block: int) -> Array:
    """`i32[R]`: the first block with open positions, or a large number."""
    return jnp.where(view.masked, number(view, block), view.positions.shape[1]).min(1)


@dataclasses.dataclass(frozen=True)
class Anchored(Unmask):
    """Only a region's first position in its first step, however sure it is; afterwards as `rule` says. This is
    Fast-dLLM's code for Dream, where the cached forwards of a block do not include the position that predicts its first
    one, and Fast-dLLM v2, where the forward that finishes a block predicts the first token of the next."""

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
