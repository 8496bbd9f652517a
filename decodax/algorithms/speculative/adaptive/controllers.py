"""Rules that pick the arm of the next round: from measured costs, as a bandit, or by what the last round accepted."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arms:
    """What a controller knows of the arms that it picks from.

    Attributes:
        lengths: the most drafts on a path of each.
        families: a number for each; arms with the same draft have the same.
        on_paper: for each, whether its drafts may be tried on paper, at no cost.
    """

    lengths: tuple[int, ...]
    families: tuple[int, ...]
    on_paper: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


@struct
class RoundOutcome(Struct):
    """What a controller learns of a round.

    Attributes:
        arm: `i32[]`. running: `bool[B]`. tokens: `i32[B]` decided. accepted: `i32[B]` drafts.
        tried, held: `bool[B, K]` whether all drafts before depth 1 .. K held, and whether that one held too; a row
            without a draft counts as one in which it did not. False in rows that are not running.
    """

    arm: Array
    running: Array
    tokens: Array
    accepted: Array
    tried: Array
    held: Array


class Controller(abc.ABC):
    """A rule that picks arms: derive a frozen dataclass from this, static under jit.

    Attributes:
        notes: it wants to be told of drafts that were tried on paper.
    """

    notes: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, of: Arms, batch: int) -> Any:
        """Its state. Every leaf has an explicit dtype and a leading batch axis, since what a decoding state carries is
        selected, repeated and sharded by rows; `for_rows` gives what is the batch's that axis. A row that
        begins in the place of another one has the state that this gives; `of_batch` finds the batch's among them."""

    @abc.abstractmethod
    def choose(self, of: Arms, state: Any, s: State) -> Array:
        """The next arm, `i32[]`."""

    @abc.abstractmethod
    def update(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """After a round."""

    def note(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        """After drafts were tried on paper."""
        return state


def for_rows(state: T, batch: int) -> T:
    """What is the batch's, once a row."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)


def of_batch(state: T, round: Array) -> T:
    """Returns the batch's part of a state that has a copy of it for each row: the copy of the row with the largest
    `round` (`i32[B]`), the number of updates it has seen. A row that has just come in has seen none, and an update
    gives all rows the new copy, so the batch's memory lasts as long as any of its rows."""
    return jax.tree.map(lambda x: x[jnp.argmax(round)], state)


@struct
class Rates(Struct):
    """`Automatic`'s memory.

    Attributes:
        tried, held: `f32[B, A, K]` fading counts by row, arm and depth; arms with one draft share them.
        wait: `i32[B]` rounds until drafts that were given up are probed again; the batch's.
        probes: `i32[B]` how often they failed in a row, at least 1 once they were tried; 0 before; the batch's.
        round: `i32[B]` number of updates that it has seen; the batch's.
    """

    tried: Array
    held: Array
    wait: Array
    probes: Array
    round: Array


@dataclasses.dataclass(frozen=True)
class Automatic(Controller):
    """Picks the arm with which the batch is done first, from measured costs and the acceptance seen by row and depth.

    A row gains 1 + sum over k of the product of the first k acceptance rates a round from an arm of length K, and the
    batch lasts as long as the row with the most rounds before it. So text that one row copies is not drafted at the
    cost of others that write anew and have as much to write. Of a batch of one this is the most tokens a second.

    Drafts that are free to try on paper start when they are seen to hold there. Others are tried until they are seen to
    fail, and then probed so rarely that it costs `probing` of the time, ever more rarely, at least every `patience`
    rounds.

    Attributes:
        costs: seconds of a round of each arm (or any other unit), as `measure` finds them for a batch size.
        memory: rounds after which an observation weighs 1/e.
        shared: how many observations of a row the batch's rate weighs as much as.
        probing: share of the time that goes into probes of drafts that were given up.
        patience: the longest wait between probes.

    Raises:
        ValueError: a cost, memory, weight, share or patience that is not positive.
    """

    notes: ClassVar[bool] = True

    costs: tuple[float, ...]
    memory: float = 32.0
    shared: float = 1.0
    probing: float = 0.01
    patience: int = 1024

    def __post_init__(self) -> None:
        for name, value in (("costs", min(self.costs, default=0)), ("memory", self.memory), ("shared", self.shared),
                            ("probing", self.probing), ("patience", self.patience)):
            if value <= 0:
                raise ValueError(f"{name}: got {value}, takes numbers above 0")

    def init(self, of: Arms, batch: int) -> Rates:
        if len(of) != len(self.costs):
            raise ValueError(f"costs: got {len(self.costs)} for {len(of)} arms")
        # half an imagined draft, of which three quarters hold; of one that is tried on paper first, a fifth
        tried = jnp.full((len(of), of.longest), 0.5, jnp.float32)
        free = jnp.array(of.on_paper)[:, None] & (jnp.arange(of.longest) == 0)
        zero = jnp.zeros((), jnp.int32)
        return for_rows(Rates(tried=tried, held=tried * jnp.where(free, 0.2, 0.75), wait=zero, probes=zero,
                              round=zero), batch)

    def choose(self, of: Arms, state: Rates, s: State) -> Array:
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
        wait, probes = of_batch((state.wait, state.probes), state.round)
        probe = (lengths[best] == 0) & (wait <= 0) & (probes > 0) & costly.any()
        return jnp.where(probe, jnp.argmin(jnp.where(costly, time, jnp.inf)), best).astype(jnp.int32)

    def update(self, of: Arms, state: Rates, seen: RoundOutcome) -> Rates:
        lengths, costs = jnp.array(of.lengths), jnp.array(self.costs, jnp.float32)
        plain = jnp.where(lengths == 0, costs, jnp.inf).min()
        extra = jnp.where(jnp.isfinite(plain), jnp.maximum(costs[seen.arm] / plain - 1, 0), 0)
        drafted = lengths[seen.arm] > 0
        failed = drafted & ~seen.held[:, :1].any()
        waited, before, round = of_batch((state.wait, state.probes, state.round), state.round)
        probes = jnp.where(failed, jnp.minimum(before + 1, 16), jnp.where(drafted, 0, before))
        wait = jnp.minimum(extra / self.probing * 2.0 ** (probes - 1), self.patience).astype(jnp.int32)
        wait, probes, round = for_rows((jnp.where(drafted, wait, waited - 1), jnp.maximum(probes, drafted), round + 1),
                                       len(seen.running))
        return self.note(of, state.replace(wait=wait, probes=probes, round=round), seen)

    def note(self, of: Arms, state: Rates, seen: RoundOutcome) -> Rates:
        """Adds what was seen of an arm's drafts to the rates of all arms with the same draft."""
        family = jnp.array(of.families)
        same = (family == family[seen.arm])[:, None] & seen.tried[:, None, :]
        fade = jnp.where(same, jnp.exp(-1 / self.memory), 1.0)
        return state.replace(tried=state.tried * fade + same,
                             held=state.held * fade + (same & seen.held[:, None, :]))


@struct
class Pulls(Struct):
    """What a bandit remembers, the batch's (`of_batch`): for each arm `count` `f32[A]`, `reward` `f32[A]` summed,
    log-weights `weight` `f32[A]`; `round` `i32[]`, the number of updates that it has seen."""

    count: Array
    reward: Array
    weight: Array
    round: Array


@dataclasses.dataclass(frozen=True)
class Bandit(Controller):
    """BanditSpec (Hou et al. 2025): an arm is a speculative configuration, the reward of a pull the tokens that a row
    gains by a round, scaled to [0, 1] by the longest arm.

    Attributes:
        rule: "ucb", the largest mean plus `sqrt(explore * ln t / pulls)` (UCBSpec, for rewards that stay the same), or
            "exp3", exponential weights of importance-weighted rewards (EXP3Spec, for any sequence of rewards).
        explore: the bonus' factor of "ucb".
        rate: learning rate of "exp3". mix: how much of its choice is uniform.
        costs: of a round of each arm; the reward is then tokens for the cost, where the paper counts tokens alone.

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

    def init(self, of: Arms, batch: int) -> Pulls:
        if self.costs is not None and len(self.costs) != len(of):
            raise ValueError(f"costs: got {len(self.costs)} for {len(of)} arms")
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


@struct
class BassState(Struct):
    """`Bass`'s memory, the batch's (`of_batch`): the length `i32[]`, whether it was cut last time, `i32[]`, and the
    number of updates that it has seen, `round` `i32[]`."""

    length: Array
    cut: Array
    round: Array


@dataclasses.dataclass(frozen=True)
class Bass(Controller):
    """One draft length for the batch (BASS, Qian et al. 2024): if some row accepts all of it, it grows by `grow`; else
    it shrinks by a `shrink`-th and, if it shrank the round before, one more, never below what the best row accepted.
    The longest arm that is not longer is taken. The numbers are the paper's.

    Raises:
        ValueError: a number below 1.
    """

    start: int = 7
    grow: int = 2
    shrink: int = 10

    def __post_init__(self) -> None:
        for name in ("start", "grow", "shrink"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes at least 1")

    def init(self, of: Arms, batch: int) -> BassState:
        zero = jnp.zeros((), jnp.int32)
        return for_rows(BassState(length=zero + min(self.start, of.longest), cut=zero, round=zero), batch)

    def choose(self, of: Arms, state: BassState, s: State) -> Array:
        lengths = jnp.array(of.lengths)
        fits = jnp.where(lengths <= of_batch(state.length, state.round), lengths, -1)
        return jnp.where(fits.max() >= 0, jnp.argmax(fits), jnp.argmin(lengths)).astype(jnp.int32)

    def update(self, of: Arms, state: BassState, seen: RoundOutcome) -> BassState:
        drafted, state = jnp.array(of.lengths)[seen.arm], of_batch(state, state.round)
        grown = jnp.minimum(state.length + self.grow, of.longest)
        cut = state.length - -(-state.length // self.shrink) - state.cut
        most = jnp.where(seen.running, seen.accepted, 0).max()
        whole = most >= drafted
        length = jnp.where(whole, grown, jnp.maximum(jnp.maximum(cut, most), 1))
        return for_rows(BassState(length=length, cut=(~whole).astype(jnp.int32), round=state.round + 1),
                        len(seen.running))
