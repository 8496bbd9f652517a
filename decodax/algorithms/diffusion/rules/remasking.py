"""Remasking rules: after unmasking, tokens are kept, masked again, replaced by others or by noise."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import noise
from decodax.algorithms.diffusion.policies import Counts, Memory, Remask, Seen, View
from decodax.algorithms.diffusion.rules.scores import Confidence
from decodax.algorithms.diffusion.rules.unmasking import best, reaches, remaining, time
from decodax.core import keys
from decodax.core.keys import Purpose


@dataclasses.dataclass(frozen=True)
class Keep(Remask):
    """Unmasked tokens stay."""

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        return after


@dataclasses.dataclass(frozen=True)
class ReMDM(Counts, Remask):
    """Remasking with coins (ReMDM, Wang et al. 2025): each decided token is masked again with probability sigma.

    Attributes:
        steps: of a region. eta: the size of sigma.
        kind: "cap": `min(eta, (1 - a_s) / a_t)`. "rescale": `eta` times that bound. "conf": the bound times each
            token's share of softmax(-p) over the decided ones, with `p` its probability when it was decided. "loop":
            the share of decided positions rises to `held` until time `on`, stays there until `off` while sigma is
            `eta`, and then rises to 1; as in the authors' code, with their numbers.
        eps: where time ends; the last step decides all that is open.
    """

    steps: int = 64
    eta: float = 0.02
    kind: Literal["cap", "rescale", "conf", "loop"] = "cap"
    on: float = 0.55
    off: float = 0.05
    held: float = 0.9
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.off < self.on < 1:
            raise ValueError(f"on, off: got {self.on} and {self.off}, takes 0 < off < on < 1")
        if self.kind == "loop" and not 0 < self.held <= 1 / (1 + self.eta):
            raise ValueError(f"held: got {self.held}, takes more than 0 up to 1 / (1 + eta)")

    def shares(self, view: View) -> tuple[Array, Array]:
        """`f32[R]` each: the share of positions that are masked at the beginning and at the end of a step."""
        t, s = time(view.step, self.steps, self.eps)
        if self.kind != "loop":
            return t, s
        rise, end = self.held / (1 - self.on), (1 - self.held) / self.off
        at = lambda x: jnp.where(t > self.on, 1 - (1 - x) * rise, jnp.where(t <= self.off, x * end, 1 - self.held))
        return at(t), at(s)

    def _bound(self, view: View) -> Array:
        t, s = self.shares(view)
        return jnp.where(t < 1, jnp.minimum(s / jnp.where(t < 1, 1 - t, 1), 1), 1)

    def scale(self, view: View) -> Array:
        """`f32[R]`: sigma at masked positions, for `Coins`."""
        if self.kind == "conf":
            return jnp.zeros(view.start.shape)
        if self.kind == "loop":
            t, _ = time(view.step, self.steps, self.eps)
            return jnp.where((t > self.off) & (t <= self.on), jnp.float32(self.eta), 0)
        return jnp.minimum(self.eta, self._bound(view)) if self.kind == "cap" else self.eta * self._bound(view)

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        if self.kind == "conf":
            share = jax.nn.softmax(jnp.where(before.unmasked, -jnp.exp(before.confidence), -jnp.inf), axis=1)
            sigma = share * self._bound(before)[:, None]
        else:
            sigma = self.scale(before)[:, None]
        back = before.unmasked & (before.uniforms(Purpose.REMASK)[..., 0] < sigma)
        return after.replace(open=after.open | back)

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        return before.step + 1 < self.steps


@dataclasses.dataclass(frozen=True)
class MaskBottom(Counts, Remask):
    """MaskGIT (Chang et al. 2022) as its loop is written: all candidates are taken (`All`), and the least sure of this
    step's are masked again, as many as the cosine schedule leaves open; at least one stays."""

    steps: int = 12
    score: Any = Confidence()

    @property
    def of(self) -> str:      # type: ignore[override]
        return self.score.of

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        new = before.active & ~after.open
        keep = jnp.maximum(before.masked.sum(1, dtype=jnp.int32) - remaining(before, self.steps), 1)
        return after.replace(open=after.open | new & ~best(self.score(before, seen, memory), new, keep))


@dataclasses.dataclass(frozen=True)
class Edit(Remask):
    """Token-to-token editing (LLaDA 2.1, 2026): a decided token is replaced by another candidate whose probability is
    above `threshold`. A region without open positions is edited until nothing changes, for at most `most` more steps.
    """

    threshold: float = 0.9
    most: int = 16

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        sure = reaches(seen, "model", "confidence", self.threshold, strict=True) & seen.reached & (seen.token >= 0)
        edit = before.unmasked & sure
        return after.replace(tokens=jnp.where(edit, seen.token, after.tokens))

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        changed = (before.editable & before.inside & (before.tokens != after.tokens)).any(1)
        return changed & (after.full < self.most)


@dataclasses.dataclass(frozen=True)
class Renoise(Remask):
    """Uniform diffusion (DiffusionGemma): positions that were not accepted in this step get a random token, and all
    positions are decided again in the next step, until a stop rule ends it."""

    vocabulary: int
    noisy = True

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        # salt 0 is the first canvas's
        u = keys.uniforms(before.key, before.positions, Purpose.NOISE, salt=before.round + 1)
        fresh = noise(u, self.vocabulary)
        return after.replace(open=before.open, tokens=jnp.where(after.open & before.active, fresh, after.tokens))
