"""ReMDM: ancestral sampling that also remasks decided tokens ("Remasking Discrete Diffusion Models with Inference-Time
Scaling", Wang et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Memory, Remask, Stepped, Unmask
from decodax.algorithms.diffusion.rules.scores import Random
from decodax.algorithms.diffusion.rules.unmasking import time
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, NonNegative, Share
from decodax.common.registry import ALGORITHMS
from decodax.core.keys import Purpose


@dataclasses.dataclass(frozen=True)
class ReMDM(Stepped, Remask):
    """Remasks each decided token with probability sigma. Sigma has an upper bound, `min(1, (1 - a_s) / a_t)`, where
    `a_t` and `a_s` are the shares of decided positions at the beginning and the end of a step.

    Attributes:
        steps: number of steps of a window.
        eta: scale of sigma.
        kind: "cap": the minimum of `eta` and the bound. "rescale": `eta` times the bound. "conf": the bound times each
            token's share of softmax(-p) over the decided ones, with `p` its probability when it was decided. "loop":
            the share of decided positions rises to `held` until time `on`, does not change until `off` while sigma is
            `eta`, and then rises to 1; as in the authors' code, with their numbers.
        on, off: times at which the loop of "loop" begins and ends; time falls from 1 to 0.
        held: share of decided positions in the loop.
        eps: time at the end of the last step, in which all open positions are decided.
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
        """Returns the shares of positions that the schedule has masked before and after the current step, `f32[R]`
        each, from 0 to 1."""
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
        """Returns the probability sigma with which a decided token is remasked in this step, `f32[R]`, as `Coins` needs
        it; 0 for the kind "conf", where it differs between tokens."""
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
class Coins(Stepped, Unmask):
    """Unmasks each position independently with a probability, for processes that also remask tokens.

    In the step from time t to s, a position is decided with probability `(a_s - (1 - sigma) a_t) / (1 - a_t)`, where
    `a` is the share of decided positions in the schedule, `1 - t` unless `remask` has its own. The last step decides
    all positions. A step may unmask nothing.

    Attributes:
        steps: number of steps of a window.
        remask: a `ReMDM` with the same number of steps, which gives sigma; None: sigma is 0.
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


@ALGORITHMS.register("remdm", "Remasking Discrete Diffusion Models with Inference-Time Scaling", "Wang et al. 2025",
                     family="masked-diffusion", needs="a diffusion model")
def remdm(lm: Any, steps: Count = 64, eta: NonNegative = 0.02, kind: Literal["cap", "rescale", "conf", "loop"] = "cap",
          t_on: Share = 0.55, t_off: Share = 0.05, alpha_on: Share = 0.9, size: Count | None = None) -> MaskedDiffusion:
    """Samples the absorbing process and remasks some decided tokens, so that more steps give better texts.

    Each step takes a forward pass; the authors' code skips it if the canvas has not changed.

    Args:
        steps: number of steps for the whole text.
        eta: scale of the probability with which a decided token is remasked.
        kind: schedule of that probability, see `ReMDM`.
        t_on: time at which the loop of "loop" begins; time falls from 1 to 0.
        t_off: time at which it ends.
        alpha_on: share of decided positions in the loop.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    remask = ReMDM(steps, eta, kind, t_on, t_off, alpha_on)
    return MaskedDiffusion(Adapter.of(lm), Whole(size), Random(), Coins(steps, remask), remask, stops=())
