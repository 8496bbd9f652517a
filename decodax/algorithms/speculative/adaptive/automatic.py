"""Chooses the draft length by measured costs and observed acceptance: chains of the length that pays, or no drafts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.adaptive.controllers import Arms, Controller, RoundOutcome, for_rows, of_batch
from decodax.common.struct import Struct, struct
from decodax.core.state import State

BELIEVED, HOLD = 2.0, 0.6
"""Number of drafts whose acceptance is assumed before any was tested, and that acceptance. Drafts that never hold are
given up after about three rounds. Where drafts would have to hold more often to pay, they are not tried but probed
later, so that a short text costs no more than plain decoding."""

PLAIN = 8
"""Number of rounds of plain decoding before the arms are compared again."""


@struct
class Rates(Struct):
    """State of `Automatic`.

    Attributes:
        tried: `f32[B, A, K]`, number of tested drafts by row, arm and depth, with exponential decay; arms with the same
            draft share them.
        held: `f32[B, A, K]`, number of these that were accepted.
        clocks: `i32[B, 4]`, common to the batch (`of_batch`); one array, since a round without drafts changes nothing
            else. `wait`, number of rounds until drafts that were given up are probed again; `probes`, number of failed
            probes in a row, at least 1 after drafts were tried, 0 before; `stay`, number of rounds for which plain
            decoding goes on before the arms are compared again; and `round`, number of updates.
    """

    tried: Array
    held: Array
    clocks: Array

    @property
    def common(self) -> Array:
        """The values of `clocks` that hold for the whole batch, `i32[4]`, taken from the row with the most updates."""
        return of_batch(self.clocks, self.clocks[:, 3])


@dataclasses.dataclass(frozen=True)
class Automatic(Controller):
    """Chooses the arm (a draft length, or no drafts) with which the batch would finish first, from measured costs and
    from the acceptance observed for each row and depth.

    With an arm of length K, a row gains 1 + sum over k = 1 .. K of the product of the first k acceptance rates in a
    round, and the batch takes as many rounds as its slowest row. So drafts that help only one row are not made at the
    cost of other rows that have as much left to write. For a batch of one, this is the arm with the most tokens per
    second.

    Drafts that can be compared without a forward pass (`Arms.on_paper`) are used once the comparison shows that they
    would be accepted. Others are used until they fail, if they would pay with the acceptance rate `HOLD`. Otherwise
    they are probed (used for a round) with growing intervals, so that probes take the share `probing` of the time, but
    at least every `patience` rounds; a text with fewer tokens left than the first interval has no probe.

    Attributes:
        costs: duration of a round of each arm, in seconds or any other unit, from `measure` for the batch size.
        memory: number of rounds after which the weight of an observation is 1/e.
        shared: weight of the batch's acceptance rate in that of a row, in observations.
        probing: share of the time for probes of drafts that were given up.
        patience: largest number of rounds between probes.

    Raises:
        ValueError: a number that is not positive.
    """

    notes: ClassVar[bool] = True

    costs: tuple[float, ...]
    memory: float = 32.0
    shared: float = 1.0
    probing: float = 0.02
    patience: int = 1024

    def __post_init__(self) -> None:
        for name, value in (("costs", min(self.costs, default=0)), ("memory", self.memory), ("shared", self.shared),
                            ("probing", self.probing), ("patience", self.patience)):
            if value <= 0:
                raise ValueError(f"{name}: got {value}, takes numbers above 0")

    def check_arms(self, count: int) -> None:
        if len(self.costs) != count:
            raise ValueError(f"costs: got {len(self.costs)} for {count} arms")

    def init(self, of: Arms, batch: int) -> Rates:
        self.check_arms(len(of))
        tried, held = map(jnp.array, self._assumed(of))
        clocks = jnp.zeros(4, jnp.int32).at[0].set(self._first_probe(of))
        return for_rows(Rates(tried=tried, held=held, clocks=clocks), batch)

    def first(self, of: Arms) -> int | None:
        tried, held = self._assumed(of)
        tokens = 1 + np.cumsum(np.cumprod(held / tried, 1), 1)
        per_round = [tokens[arm, length - 1] if length else 1.0 for arm, length in enumerate(of.lengths)]
        best = int(np.argmin(np.array(self.costs) / per_round))
        return None if of.lengths[best] == 0 and self._first_probe(of) < 1 else best

    def _assumed(self, of: Arms) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of tested and accepted drafts by arm and depth that are assumed at first, `f32[A, K]`, so
        that the first failures do not decide; of drafts that are compared on paper first, half a draft."""
        free, depth = np.array(of.on_paper)[:, None], np.arange(of.longest)
        tried = np.where(free, 0.5, np.full(of.longest, BELIEVED)).astype(np.float32)
        return tried, tried * np.where(free, np.where(depth == 0, 0.2, 0.75), HOLD).astype(np.float32)

    def _first_probe(self, of: Arms) -> int:
        """Returns the number of rounds before drafts that would not pay with the assumed acceptance are probed."""
        extra = min((self._extra(of, arm) for arm, length in enumerate(of.lengths) if length), default=0.0)
        return int(min(extra / self.probing, self.patience))

    def _extra(self, of: Arms, arm: int) -> float:
        """Returns how much longer a round of an arm takes than one without drafts, as a multiple of that."""
        plain = min((cost for cost, length in zip(self.costs, of.lengths, strict=True) if not length), default=None)
        return 0.0 if plain is None else max(self.costs[arm] / plain - 1, 0.0)

    def choose(self, of: Arms, state: Rates, s: State) -> Array:
        stay = state.common[2]
        plain = of.lengths.index(min(of.lengths))
        return lax.cond(stay > 0, lambda: jnp.int32(plain), lambda: self._compare(of, state, s))

    def _compare(self, of: Arms, state: Rates, s: State) -> Array:
        """Returns the arm with which the batch would finish first, or the best one with drafts if a probe is due."""
        arms, lengths = jnp.arange(len(of)), jnp.array(of.lengths)
        sum_of = lambda x: jnp.where(s.running[:, None, None], x, 0).sum(0)
        everywhere = sum_of(state.held) / jnp.maximum(sum_of(state.tried), 1e-6)
        rate = (state.held + self.shared * everywhere) / (state.tried + self.shared)
        tokens = 1 + jnp.cumsum(jnp.cumprod(rate, 2), 2)
        tokens = jnp.pad(tokens, ((0, 0), (0, 0), (1, 0)), constant_values=1.0)[:, arms, lengths]
        left = jnp.where(s.running, s.max_length - s.length, 0)
        time = (left[:, None] / tokens).max(0) * jnp.array(self.costs, jnp.float32)
        best = jnp.argmin(time)
        costly = (lengths > 0) & ~jnp.array(of.on_paper)
        wait, _, _, _ = state.common
        # a probe costs its share of the time that is left, too
        worth = left.max() >= self._first_probe(of)
        probe = (lengths[best] == 0) & (wait <= 0) & worth & costly.any()
        return jnp.where(probe, jnp.argmin(jnp.where(costly, time, jnp.inf)), best).astype(jnp.int32)

    def update(self, of: Arms, state: Rates, seen: RoundOutcome) -> Rates:
        waited, probes, stay, round = state.common
        if of.lengths[seen.arm] == 0:
            # without drafts there is nothing to learn, unless some are compared on paper, until a probe is due
            stay = jnp.zeros_like(stay) if any(of.on_paper) else jnp.where(
                stay > 0, stay - 1, jnp.clip(waited - 1, 0, PLAIN - 1))
            common = waited - 1, probes, stay, round + 1
        else:
            extra = self._extra(of, seen.arm)
            failed = ~seen.held[:, :1].any()
            # of the failures before they are given up only the first counts
            probe = (waited <= 0) | (probes == 0)
            probes = jnp.where(failed, jnp.minimum(probes + probe, 16), 0)
            wait = jnp.minimum(extra / self.probing * 2.0 ** (probes - 1), self.patience).astype(jnp.int32)
            common = wait, jnp.maximum(probes, 1), jnp.zeros_like(stay), round + 1
            state = self.note(of, state, seen)
        return state.replace(clocks=for_rows(jnp.stack(common), len(seen.running)))

    def note(self, of: Arms, state: Rates, seen: RoundOutcome) -> Rates:
        """Returns the state after drafts of arm `seen.arm` were compared with the target's tokens. Their acceptance
        counts for all arms with the same draft."""
        family = np.array(of.families)
        same = (family == family[seen.arm])[:, None] & seen.tried[:, None, :]
        fade = jnp.where(same, jnp.exp(-1 / self.memory), 1.0)
        return state.replace(tried=state.tried * fade + same,
                             held=state.held * fade + (same & seen.held[:, None, :]))
