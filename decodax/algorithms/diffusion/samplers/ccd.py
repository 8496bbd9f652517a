"""CCD, coherent contextual decoding: unmasks positions on which successive steps agree ("Beyond Confidence: Adaptive
and Coherent Decoding for Diffusion Language Models", Chen et al., 2025).

`Agreeing` is the rule of the released code (CCD-DS). Each step stores the most confident positions that it left open,
and the likeliest token of every position. The next step compares its own most confident positions: those that were
stored, and whose likeliest token is unchanged, are decided together. If none of the step's best positions was stored,
or too few agree, the step decides its quota. The number of stored positions grows by one in each step. `Average` is the
paper's estimate of a token's distribution over contexts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Memory, Score, Shaper, Stepped, Unmask
from decodax.algorithms.diffusion.rules.scores import Confidence, NegEntropy
from decodax.algorithms.diffusion.rules.shapers import Past
from decodax.algorithms.diffusion.rules.unmasking import Quota, Threshold, best
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.stats import rank
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, NonNegative
from decodax.common.options import Whole as WholeNumber
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct


@struct
class Kept(Struct):
    """Memory of `Agreeing` from one step to the next.

    Attributes:
        surest: `bool[B, W]`, the most confident positions that are still open.
        token: `i32[B, W]`, the likeliest tokens.
        size: `i32[B]`, maximum number of positions of `surest`.
    """

    surest: Array
    token: Array
    size: Array


@dataclasses.dataclass(frozen=True)
class Agreeing(Stepped, Unmask):
    """Unmasks the positions on which this step and the one before it agree, or the step's quota.

    Attributes:
        steps: number of steps of a window. The quota is the number of its initially open positions divided by this,
            rounded down, and at least 1. None: one position per step. The last step takes its quota.
        adaptive: True: all positions that agree are decided (CCD-DS). False: at most the quota, chosen among them.
        grow: the number of stored positions grows up to `1 + grow` times the quota.
        warmup: number of first steps that take their quota.
        score: score by which positions are the most confident.
    """

    steps: int | None = None
    adaptive: bool = True
    grow: float = 4.0
    warmup: int = 5
    score: Any = NegEntropy()
    reads = 1

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes 1 or more")
        if self.grow < 0 or self.warmup < 1:
            raise ValueError(f"grow, warmup: got {self.grow}, {self.warmup}, take 0 or more and 1 or more")

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    def init(self, view: View) -> Memory:
        return Kept(surest=jnp.zeros(view.positions.shape, bool), token=jnp.full(view.positions.shape, -1, jnp.int32),
                    size=jnp.ones(view.start.shape, jnp.int32))

    def _quota(self, view: View) -> Array:
        """Returns the number of positions that a step decides without agreement, `i32[R]`."""
        return jnp.maximum(view.opened // (view.opened if self.steps is None else self.steps), 1)

    def _size(self, view: View, memory: Kept) -> Array:
        """Returns the number of most confident positions that the step compares and stores, `i32[R]`."""
        quota, left = self._quota(view), view.masked.sum(1, dtype=jnp.int32)
        late = left <= 0.1 * view.opened.astype(jnp.float32)
        grown = jnp.where(late, 1, memory.size) + 1
        most = quota + (quota.astype(jnp.float32) * self.grow).astype(jnp.int32)
        return jnp.where(view.step < self.warmup - 1, 1, jnp.minimum(grown, most))

    def _chosen(self, view: View, seen: Seen, score: Array, open: Array, memory: Kept) -> Array:
        """Returns the chosen ones of the positions `open`, `bool[R, W]`."""
        assert seen.likeliest is not None
        order, quota = rank(score, open), self._quota(view)
        surest = best(score, open, quota)
        agree = open & memory.surest & (order < self._size(view, memory)[:, None]) & \
            (seen.likeliest[0][..., 0] == memory.token)
        enough = (surest & memory.surest).any(1) & (agree.sum(1) >= quota) & (view.step >= self.warmup)
        last = view.opened if self.steps is None else self.steps
        enough = enough & (view.step < last - 1)
        taken = agree if self.adaptive else best(score, agree, quota)
        return jnp.where(enough[:, None], taken, surest)

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return self._chosen(view, seen, score, view.active, memory)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        assert seen.likeliest is not None
        open, score = before.masked & seen.reached, self.score(before, seen, None)
        rest = open & ~self._chosen(before, seen, score, open, memory)
        size = self._size(before, memory)
        new = Kept(surest=best(score, rest, size), token=seen.likeliest[0][..., 0].astype(jnp.int32), size=size)
        gone = after.step == 0
        keep = lambda x, none: jnp.where(gone.reshape(-1, *[1] * (x.ndim - 1)), none, x)
        return Kept(surest=keep(new.surest, False), token=keep(new.token, -1), size=keep(new.size, 1))


@dataclasses.dataclass(frozen=True)
class Average(Shaper):
    """Returns the mean of a position's distributions in this step and in the `past` steps before it, an estimate of its
    marginal over contexts.

    Past distributions have their `kept` likeliest tokens only; the mass of all others is lost, and the mean is
    normalised without it. The paper averages over all steps so far, and over a few of the last ones. The released code
    decides by agreement instead (`Agreeing`).

    Attributes:
        past: number of past steps.
        kept: number of likeliest tokens of a past distribution.
    """

    past: int = 3
    kept: int = 8

    def __post_init__(self) -> None:
        for name, value, low in (("past", self.past, 0), ("kept", self.kept, 1)):
            if value < low:
                raise ValueError(f"{name}: got {value}, takes {low} or more")

    @property
    def reads(self) -> int:      # type: ignore[override]
        return self.kept if self.past else 0

    @property
    def remembers(self) -> bool:
        return self.past > 0

    def init(self, view: View) -> Memory:
        return Past.empty(view, self.past * self.kept) if self.past else None

    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        # a softmax's logarithm is its logits but for a constant: the mean's is that of the sum
        return logits if memory is None else jnp.log(memory.onto(jax.nn.softmax(logits)))

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        if memory is None:
            return None
        assert seen.likeliest is not None
        ids, log_probs = seen.likeliest
        probs = jnp.where(seen.reached[..., None], jnp.exp(log_probs), 0)
        shift = lambda new, old: jnp.concatenate([new, old], -1)[..., :old.shape[-1]]
        return Past(shift(ids, memory.ids), shift(probs, memory.amount)).unless(after.step == 0)


@ALGORITHMS.register("ccd", "Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models",
                     "Chen et al. 2025", family="masked-diffusion", needs="a diffusion model")
def ccd(lm: Any, rule: Literal["agreement", "mean"] = "agreement", steps: Count | None = None, adaptive: bool = True,
        grow: NonNegative = 4.0, order: Literal["confidence", "entropy"] = "entropy", size: Count | None = None,
        past: WholeNumber = 3, kept: Count = 8, bound: NonNegative | None = None,
        block_length: Count | None = None) -> MaskedDiffusion:
    """Unmasks positions on which two successive steps agree, or candidates by the mean of the last steps'
    distributions.

    "agreement" is the rule that the authors released, over the whole text. "mean" is the paper's estimate of a token's
    distribution over contexts, which the released code does not compute; it fills blocks.

    Args:
        rule: "agreement" or "mean".
        steps: number of steps of the text, or for "mean" of a block, for the quota. None: one position per step.
        adaptive: True: all positions that agree are unmasked. False: at most the quota.
        grow: the number of positions that are compared grows up to `1 + grow` times the quota.
        order: score by which positions are the most confident: "entropy" or "confidence".
        size: maximum number of new tokens of a text, for "agreement". None: the budget of the call.
        past: number of earlier steps in the mean.
        kept: number of likeliest tokens of an earlier distribution in the mean.
        bound: "mean" unmasks all positions whose mean has at most this entropy, in nats. None: the quota.
        block_length: number of positions of a block, for "mean". None: the model's, or 32.
    """
    adapter = Adapter.of(lm)
    score: Score = NegEntropy() if order == "entropy" else Confidence()
    if rule == "agreement":
        return MaskedDiffusion(adapter, Whole(size), score, Agreeing(steps, adaptive, grow, score=score))
    windows, caching = blocks(adapter, block_length)
    unmask: Unmask = Quota(steps) if bound is None else Threshold(bound, "entropy")
    return MaskedDiffusion(adapter, windows, score, unmask, caching=caching, shaper=Average(past, kept))
