"""Which candidates are unmasked in a step: quotas, thresholds, factors, entropy bounds, prefixes, coins, all."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.core.keys import Purpose, uniforms
from decodax.diffusion.policies import Counts, Memory, Seen, Unmask, View
from decodax.diffusion.rules.scores import Of
from decodax.diffusion.stats import rank

Measure = Literal["confidence", "margin", "entropy"]


def reaches(seen: Seen, of: Of, measure: Measure, value: float, strict: bool = False) -> Array:
    """`bool[R, W]`: the candidate's probability or the margin is at least `value`, or the entropy at most; with
    `strict` more than that, or less."""
    stats = seen.of(of)
    x, bar = {"confidence": (stats.log_prob, jnp.log(jnp.float32(value))), "margin": (stats.margin, jnp.float32(value)),
              "entropy": (-stats.entropy, jnp.float32(-value))}[measure]
    return x > bar if strict else x >= bar


def best(score: Array, among: Array, count: Array) -> Array:
    """`bool[R, W]`: the `count` (`i32[R]`) best positions."""
    return among & (rank(score, among) < count[:, None])


def time(step: Array, steps: int, eps: float = 0.0) -> tuple[Array, Array]:
    """Where a step of `steps` goes from and to, `f32[R]` each: from 1 down to `eps`, evenly."""
    at = lambda i: 1 - (1 - eps) * jnp.minimum(i, steps).astype(jnp.float32) / steps
    return at(step), at(step + 1)


@dataclasses.dataclass(frozen=True)
class Quota(Counts, Unmask):
    """The best so many, fixed in advance.

    Attributes:
        steps: of a region; None: one position a step.
        schedule: "even": LLaDA's split of the positions open at first, remainder first. "width": the same split of the
            whole region, the prompt's tokens in it counted in (SDAR, LLaDA 2). "time": Dream's share `1 - s/t` of those
            still open, rounded down, all in the last step. The share may be less than one position: such a step unmasks
            nothing (with as many steps as positions, the published default, the first one). "cosine": MaskGIT's: after
            step `i` (from 1) `floor(opened * cos(pi/2 * i/steps))` are left, but one at least before the last step.
            "power": ReCAP's: from step to step what `floor(opened * (1 - (i/steps)^2.5))` falls by, one at least, and
            all in the last.
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
    """All that are sure enough (Fast-dLLM's threshold, Wu et al. 2025; dParallel's by entropy, Chen et al. 2025).

    Attributes:
        value, measure, of, strict: see `reaches`.
        slack: of "confidence": the bar is never above the surest one's probability less this, so those that are as good
            as equal to it go with it (dInfer's threshold decoder, 1e-5).
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
    """Fast-dLLM's factor rule: the more are unmasked at once, the surer each must be. By falling confidence, rank `r`
    from 1, the first always:

    Attributes:
        factor: `f`.
        variant: "a": while `c_r >= 1 - f / (r + 1)`, as in the paper. "b": as the authors' code, which also takes the
            last of all open positions when it is the only one to fail. "c": while `c_r > 1 - f / r`, looser.
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
    """Entropy-bounded unmasking (EB-sampler, Ben-Hamu et al. 2025): the longest list by falling score whose entropies
    sum to at most `bound`, the largest of them not counted, so one is always taken; `inclusive` counts it (SDAR)."""

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
    """All up to the first that is not sure enough (SDLM, Liu et al. 2025). With `Position` as the score the first one
    is always taken."""

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
    of time from 1 to `eps`, the last of which takes all that is left.

    A position falls in the step from t to s with probability `1 - s/t`, whatever the others do: at a uniform time. So
    each draws its time at once, and the steps in which none falls, whose forward would change nothing (MDLM's cached
    sampler skips it), do not take place. With steps without end this is first-hitting sampling: one position at a time
    in random order (`Quota` by `Random`).
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
    """A coin for each position and step, for processes that also take tokens back (ReMDM, Wang et al. 2025): from time
    t to s a position is decided with probability `(a_s - (1 - sigma) a_t) / (1 - a_t)`, `a` the share of decided ones
    by the schedule, `1 - t` unless `remask` has its own; all in the last step. A step in which no coin falls unmasks
    nothing.

    Attributes:
        steps: of a region. remask: a `ReMDM` with the same steps, whose sigma counts; None: 0.
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
    """Local determinism propagation (LocalLeap, Kong et al. 2025): positions whose candidate has a probability of
    `anchor` are unmasked, and those within `radius` of one that reach `relaxed`. Only open positions of the block are
    anchors, as in the authors' code."""

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
    """dInfer's hierarchy decoder (Ma et al. 2025): all above `threshold`, and in each run of open positions side by
    side the surest one if it is above `low`, which divides the run."""

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
    """All of them."""

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return view.active


@dataclasses.dataclass(frozen=True)
class AtLeast(Unmask):
    """What `rule` unmasks where that is a step's quota or more, else the quota's (SDAR's dynamic rule, LLaDA 2)."""

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
    remainder first; past them one a step.

    It remembers the step in which the block began and its positions then, `i32[B]` each: the text may end in the block
    later.
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
    """`i32[R, W]`: which block of the region a position lies in."""
    return (view.positions - view.start[:, None]) // block


def current(view: View, block: int) -> Array:
    """`i32[R]`: the first block with open positions, or a large number."""
    return jnp.where(view.masked, number(view, block), view.positions.shape[1]).min(1)


@dataclasses.dataclass(frozen=True)
class Anchored(Unmask):
    """A region's first position in its first step, however sure, and nothing else; then as `rule` says: Fast-dLLM's
    code for Dream, where the cached forwards of a block do not reach what predicts its first position, and Fast-dLLM
    v2, where the forward that finishes a block predicts the next one's first token."""

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
