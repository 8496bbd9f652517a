"""BanditSpec: chooses drafts and their lengths by a multi-armed bandit ("BanditSpec: Adaptive Speculative Decoding via
Bandit Algorithms", Hou et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.adaptive.arms import NOTHING, Adaptive, chains
from decodax.algorithms.speculative.adaptive.controllers import Arms, Controller, RoundOutcome, for_rows, of_batch
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.text.ngram import NGram
from decodax.algorithms.speculative.drafts.text.sam_decoding import SuffixAutomaton
from decodax.common.options import Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State


@struct
class Pulls(Struct):
    """State of `Bandit`, common to the batch (`of_batch`).

    Attributes:
        count: `f32[A]`, number of rounds of each arm.
        reward: `f32[A]`, sum of rewards of each arm.
        weight: `f32[A]`, log-weight of each arm for "exp3".
        round: `i32[]`, number of updates.
    """

    count: Array
    reward: Array
    weight: Array
    round: Array


@dataclasses.dataclass(frozen=True)
class Bandit(Controller):
    """Chooses arms by a bandit algorithm (Hou et al., 2025). The reward of a round is the mean number of tokens of a
    row, divided by the largest possible number, so that it is in [0, 1].

    Attributes:
        rule: "ucb": the arm with the largest mean reward plus `sqrt(explore * ln t / pulls)` (UCBSpec, for rewards that
            do not change over time). "exp3": exponential weights of importance-weighted rewards (EXP3Spec, for any
            rewards).
        explore: factor of the bonus of "ucb".
        rate: learning rate of "exp3".
        mix: share of the choices of "exp3" that are uniform.
        costs: cost of a round of each arm; rewards are then tokens divided by cost. None: tokens, as in the paper.

    Raises:
        ValueError: an unknown rule or a number out of range.
    """

    rule: str = "ucb"
    explore: float = 0.5
    rate: float = 0.1
    mix: float = 0.05
    costs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rule not in ("ucb", "exp3"):
            raise ValueError(f"rule: got {self.rule!r}, takes 'ucb' or 'exp3'")
        if not (self.explore >= 0 and self.rate > 0 and 0 <= self.mix <= 1):
            raise ValueError(f"explore, rate, mix: got {self.explore}, {self.rate}, {self.mix}, takes explore >= 0, "
                             "rate > 0 and mix from 0 to 1")
        if self.costs is not None and min(self.costs, default=0) <= 0:
            raise ValueError(f"costs: got {self.costs}, takes numbers above 0")

    def check_arms(self, count: int) -> None:
        if self.costs is not None and len(self.costs) != count:
            raise ValueError(f"costs: got {len(self.costs)} for {count} arms")

    def init(self, of: Arms, batch: int) -> Pulls:
        self.check_arms(len(of))
        zero = lambda: jnp.zeros(len(of), jnp.float32)
        return for_rows(Pulls(count=zero(), reward=zero(), weight=zero(), round=jnp.zeros((), jnp.int32)), batch)

    def choose(self, of: Arms, state: Pulls, s: State) -> Array:
        state = of_batch(state, state.round)
        if self.rule == "exp3":
            # a coin of the first running row's: the choice changes speed only
            key = keys.at(s.key[jnp.argmax(s.running)], state.round, Purpose.ARM)
            return jax.random.categorical(key, jnp.log(self._chances(state))).astype(jnp.int32)
        pulls = jnp.maximum(state.count, 1)
        bonus = jnp.sqrt(self.explore * jnp.log(jnp.maximum(state.round, 1)) / pulls)
        return jnp.argmax(jnp.where(state.count == 0, jnp.inf, state.reward / pulls + bonus)).astype(jnp.int32)

    def update(self, of: Arms, state: Pulls, seen: RoundOutcome) -> Pulls:
        state, rows = of_batch(state, state.round), seen.running
        costs = jnp.array(self.costs or (1.0,) * len(of), jnp.float32)
        best = max(n / c for n, c in zip((k + 1 for k in of.lengths), self.costs or (1.0,) * len(of), strict=True))
        tokens = jnp.where(rows, seen.tokens, 0).sum() / jnp.maximum(rows.sum(), 1)
        reward = tokens / costs[seen.arm] / best
        mine = jnp.arange(len(of)) == seen.arm
        weight = state.weight + jnp.where(mine, self.rate * reward / self._chances(state), 0)
        return for_rows(Pulls(count=state.count + mine, reward=state.reward + mine * reward, round=state.round + 1,
                              weight=weight - weight.max()), len(rows))

    def _chances(self, state: Pulls) -> Array:
        return (1 - self.mix) * jax.nn.softmax(state.weight) + self.mix / state.weight.shape[0]


def _arms(lm: Any, draft: Any, lengths: tuple[int, ...], arms: Any) -> tuple[Speculative, ...]:
    """Returns the given arms; or, if None, chains of several lengths from the text, and from the draft model if there
    is one."""
    if arms is None:
        return (*chains(None, lengths), Speculative(SuffixAutomaton(max(lengths))), Speculative(NGram(max(lengths))),
                *(() if draft is None else chains(draft, tuple(k for k in lengths if k))))
    made: Any = tuple(a if not isinstance(a, str) else NOTHING if a == "autoregressive" else
                      ALGORITHMS.make(a, lm, draft) for a in arms)
    if wrong := [a for a in made if not isinstance(a, Speculative)]:
        raise ValueError(f"arms: got {type(wrong[0]).__name__}, takes Speculative algorithms and names of such systems")
    return made


@ALGORITHMS.register("ucbspec", "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", "Hou et al. 2025",
                     family="speculative-theory", guarantee="seed-exact")
def ucbspec(lm: Any = None, draft: Any = None, lengths: tuple[Whole, ...] = (0, 3, 7), arms: Any = None) -> Adaptive:
    """Chooses a draft and its length for each round by upper confidence bounds.

    For texts that do not change their character; `exp3spec` is for texts that do.

    Args:
        lm: the target.
        draft: a draft model, whose chains become arms, too; None: drafts from the text only.
        lengths: lengths of the chains; 0 is plain decoding.
        arms: `Speculative` algorithms or their names, in place of the default arms.
    """
    return Adaptive(_arms(lm, draft, lengths, arms), Bandit("ucb"))


@ALGORITHMS.register("exp3spec", "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", "Hou et al. 2025",
                     family="speculative-theory", guarantee="seed-exact")
def exp3spec(lm: Any = None, draft: Any = None, lengths: tuple[Whole, ...] = (0, 3, 7), arms: Any = None) -> Adaptive:
    """Chooses a draft and its length for each round by exponential weights.

    For texts that change their character; the method never stops exploring.

    Args:
        lm: the target.
        draft: a draft model, whose chains become arms, too; None: drafts from the text only.
        lengths: lengths of the chains; 0 is plain decoding.
        arms: `Speculative` algorithms or their names, in place of the default arms.
    """
    return Adaptive(_arms(lm, draft, lengths, arms), Bandit("exp3"))
