"""Several ways to draft, one of them picked for each round: how long, from which source, or not at all.

An *arm* is a `Speculative` algorithm; `NOTHING` is the arm that drafts nothing. All arms look at every round, whoever
drafted it. The choice is one for the batch, since the window's shape is: with `SeedExact` the tokens do not depend on
it, with the other verifiers their distribution does not.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Window
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.speculative.algorithm import Speculative
from decodax.speculative.source import Drawn, Stateless
from decodax.speculative.tree import Proposal
from decodax.struct import Struct, struct


@dataclasses.dataclass(frozen=True)
class Nothing(Stateless):
    """A draft of no tokens: the round is plain decoding."""

    length: ClassVar[int] = 0

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        return Proposal(tokens=jnp.zeros((s.batch, 0), jnp.int32), live=jnp.zeros((s.batch, 0), bool)), state


NOTHING = Speculative(Nothing())


@struct
class Seen(Struct):
    """What a controller learns of a round.

    Attributes:
        arm: `i32[]`. rows: `f32[]`, how many were running. tokens: `f32[]` decided by all of them. most: `i32[]` drafts
            accepted in the best of them.
        tried, held: `f32[K]`, rows in which all drafts before depth 1 .. K held, and rows in which that one held too;
            a row without a draft counts as one in which it did not.
    """

    arm: Array
    rows: Array
    tokens: Array
    most: Array
    tried: Array
    held: Array


class Controller(Protocol):
    """A rule that picks arms: a frozen dataclass, static under jit. Its state is the batch's and has no batch axis."""

    def init(self, of: Adaptive) -> Any:
        """Its state; every leaf with an explicit dtype."""

    def choose(self, of: Adaptive, state: Any, s: State) -> Array:
        """The next arm, `i32[]`."""

    def update(self, of: Adaptive, state: Any, seen: Seen) -> Any:
        """After a round."""


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Rounds of several kinds on one state.

    Attributes:
        arms: the kinds; those with equal drafts share the draft's state.
        controller: which comes next.

    Raises:
        ValueError: no arms, or arms whose verifiers keep different guarantees.
    """

    arms: tuple[Speculative, ...]
    controller: Controller
    caches = True

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms: got none, takes one or more")
        if len(kinds := {arm.guarantee for arm in self.arms if arm != NOTHING}) > 1:
            raise ValueError(f"arms: keep different guarantees ({', '.join(sorted(kinds))}), takes one")

    @property
    def emits(self) -> int:
        return max(arm.emits for arm in self.arms)

    @property
    def guarantee(self) -> str:
        """That of the arms."""
        return next((arm.guarantee for arm in self.arms if arm != NOTHING), NOTHING.guarantee)

    @functools.cached_property
    def drafts(self) -> tuple[Any, ...]:
        """The distinct drafts, each with a state."""
        return tuple(dict.fromkeys(arm.draft for arm in self.arms))

    @property
    def weights(self) -> Any:
        return tuple(draft.weights for draft in self.drafts)

    def bare(self) -> Adaptive:
        return dataclasses.replace(self, arms=tuple(arm.bare() for arm in self.arms))

    @property
    def variants(self) -> tuple[_Arm, ...]:
        """What the core runs: one algorithm an arm."""
        return tuple(_Arm(self, i) for i in range(len(self.arms)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The most drafts on a path, for each arm."""
        return tuple(arm.emits - 1 for arm in self.arms)

    def init(self, params: Params, s: State) -> Any:
        states = [next(arm for arm in self.arms if arm.draft == draft).drafter.init(self._own(params, draft), s)
                  for draft in self.drafts]
        return _rows(self.controller.init(self), s.batch), tuple(states)

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return self.controller.choose(self, _first(s.algo[0]), s)

    def observe(self, s: State, window: Window, out: Out, algo: Any) -> Any:
        return algo[0], self._tell(s, window, out, None, algo[1])

    def _tell(self, s: State, window: Window, out: Out, decision: Decision | None, states: Any) -> Any:
        return tuple(next(arm for arm in self.arms if arm.draft == draft).drafter.observe(s, window, out, decision, x)
                     for draft, x in zip(self.drafts, states, strict=True))

    def _own(self, params: Params, draft: Any) -> Params:
        return params if params.draft is None else params.replace(draft=params.draft[self.drafts.index(draft)])


@dataclasses.dataclass(frozen=True)
class _Arm:
    """The rounds of one arm, told to all."""

    adaptive: Adaptive
    index: int
    caches = True

    @property
    def arm(self) -> Speculative:
        return self.adaptive.arms[self.index]

    @property
    def emits(self) -> int:
        return self.adaptive.emits

    def init(self, params: Params, s: State) -> Any:
        return self.adaptive.init(params, s)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        control, states = s.algo
        own = self.adaptive.drafts.index(self.arm.draft)
        window, (state, tree) = self.arm.propose(self.adaptive._own(params, self.arm.draft), policy,
                                                 s.replace(algo=(states[own], None)))
        return window, ((control, tuple(state if i == own else x for i, x in enumerate(states))), tree)

    def decide(self, policy: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        (control, states), tree = algo
        d = self.arm.judge(policy, s, window, out, tree)
        assert d.accepted is not None
        running = s.running.astype(jnp.float32)
        depth = jnp.arange(1, self.emits)
        total = lambda hit: (hit * running[:, None]).sum(0)
        seen = Seen(arm=jnp.asarray(self.index, jnp.int32), rows=running.sum(), tokens=(d.count * running).sum(),
                    most=jnp.where(s.running, d.accepted, 0).max(),
                    tried=total((depth <= d.accepted[:, None] + 1) & (depth < self.arm.emits)),
                    held=total(depth <= d.accepted[:, None]))
        spare = self.emits - d.tokens.shape[1]
        wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, spare))), (d.tokens, d.source))
        states = self.adaptive._tell(s, window, out, d, states)
        control = _rows(self.adaptive.controller.update(self.adaptive, _first(control), seen), s.batch)
        return d.replace(tokens=wide[0], source=wide[1], algo=(control, states))

    def observe(self, s: State, window: Window, out: Out, algo: Any) -> Any:
        return self.adaptive.observe(s, window, out, algo)


def _rows(state: Any, batch: int) -> Any:
    """A controller's state once a row: what a state carries is selected, repeated and sharded by rows."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)


def _first(state: Any) -> Any:
    return jax.tree.map(lambda x: x[0], state)


@struct
class Rates(Struct):
    """`Automatic`'s memory.

    Attributes:
        tried, held: `f32[A, K]` fading counts by arm and depth; arms with one draft share them.
        wait: `i32[]` rounds until drafts are probed again while the choice is to draft nothing.
        gap: `i32[]` what the wait after that will be.
    """

    tried: Array
    held: Array
    wait: Array
    gap: Array


@dataclasses.dataclass(frozen=True)
class Automatic:
    """Picks the arm of the most expected tokens a second, from measured costs and the acceptance seen by depth.

    Expected tokens of an arm of length K are 1 + sum over k of the product of the first k acceptance rates. While the
    best is to draft nothing, drafts are probed ever more rarely: after 16, 32, 64, ... rounds, at most `patience`.

    Attributes:
        costs: seconds of a round of each arm (or any other unit), as `measure` finds them for a batch size.
        memory: rounds after which an observation weighs 1/e.
        patience: the longest wait between probes.

    Raises:
        ValueError: a cost, memory or patience that is not positive.
    """

    costs: tuple[float, ...]
    memory: float = 32.0
    patience: int = 256

    def __post_init__(self) -> None:
        for name, value in (("costs", min(self.costs, default=0)), ("memory", self.memory),
                            ("patience", self.patience)):
            if value <= 0:
                raise ValueError(f"{name}: got {value}, takes numbers above 0")

    def init(self, of: Adaptive) -> Rates:
        if len(of.arms) != len(self.costs):
            raise ValueError(f"costs: got {len(self.costs)} for {len(of.arms)} arms")
        shape = len(of.arms), of.emits - 1
        # half an imagined draft, of which three quarters hold: drafts are tried until they are seen to fail
        return Rates(tried=jnp.full(shape, 0.5, jnp.float32), held=jnp.full(shape, 0.375, jnp.float32),
                     wait=jnp.full((), FIRST_WAIT, jnp.int32), gap=jnp.full((), 2 * FIRST_WAIT, jnp.int32))

    def choose(self, of: Adaptive, state: Rates, s: State) -> Array:
        arms = jnp.arange(len(of.arms))
        rate = state.held / jnp.maximum(state.tried, 1e-6)
        tokens = 1 + jnp.cumsum(jnp.cumprod(rate, 1), 1)
        tokens = jnp.concatenate([jnp.ones((len(of.arms), 1)), tokens], 1)[arms, jnp.array(of.lengths)]
        speed = tokens / jnp.array(self.costs, jnp.float32)
        drafting = jnp.array(of.lengths) > 0
        best = jnp.argmax(speed)
        probe = ~drafting[best] & (state.wait <= 0) & drafting.any()
        return jnp.where(probe, jnp.argmax(jnp.where(drafting, speed, -1)), best).astype(jnp.int32)

    def update(self, of: Adaptive, state: Rates, seen: Seen) -> Rates:
        family = jnp.array([of.drafts.index(arm.draft) for arm in of.arms])
        same = (family == family[seen.arm])[:, None] & (seen.tried > 0)
        fade = jnp.where(same, jnp.exp(-1 / self.memory), 1.0)
        add = lambda x, new: x * fade + jnp.where(same, new / jnp.maximum(seen.rows, 1), 0)
        drafted = seen.tried.sum() > 0
        probed = drafted & (state.wait <= 0)
        wait = jnp.where(probed, state.gap, jnp.where(drafted, FIRST_WAIT, state.wait - 1))
        gap = jnp.where(probed, jnp.minimum(state.gap * 2, self.patience),
                        jnp.where(drafted, 2 * FIRST_WAIT, state.gap))
        return Rates(tried=add(state.tried, seen.tried), held=add(state.held, seen.held), wait=wait, gap=gap)


FIRST_WAIT = 16
"""Rounds after which drafts that were given up are probed again."""


@struct
class Pulls(Struct):
    """What a bandit remembers: for each arm `count` `f32[A]`, `reward` `f32[A]` summed, log-weights `weight` `f32[A]`;
    `round` `i32[]`."""

    count: Array
    reward: Array
    weight: Array
    round: Array


@dataclasses.dataclass(frozen=True)
class Bandit:
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

    def init(self, of: Adaptive) -> Pulls:
        if self.costs is not None and len(self.costs) != len(of.arms):
            raise ValueError(f"costs: got {len(self.costs)} for {len(of.arms)} arms")
        zero = lambda: jnp.zeros(len(of.arms), jnp.float32)
        return Pulls(count=zero(), reward=zero(), weight=zero(), round=jnp.zeros((), jnp.int32))

    def choose(self, of: Adaptive, state: Pulls, s: State) -> Array:
        if self.rule == "exp3":
            # a coin of the first running row's: the choice changes speed only
            key = keys.at(s.key[jnp.argmax(s.running)], state.round, Purpose.ARM)
            return jax.random.categorical(key, jnp.log(self._chances(state))).astype(jnp.int32)
        pulls = jnp.maximum(state.count, 1)
        bonus = jnp.sqrt(self.explore * jnp.log(jnp.maximum(state.round, 1)) / pulls)
        return jnp.argmax(jnp.where(state.count == 0, jnp.inf, state.reward / pulls + bonus)).astype(jnp.int32)

    def update(self, of: Adaptive, state: Pulls, seen: Seen) -> Pulls:
        costs = jnp.array(self.costs or (1.0,) * len(of.arms), jnp.float32)
        best = max(n / c for n, c in zip((k + 1 for k in of.lengths), self.costs or (1.0,) * len(of.arms), strict=True))
        reward = seen.tokens / jnp.maximum(seen.rows, 1) / costs[seen.arm] / best
        mine = jnp.arange(len(of.arms)) == seen.arm
        weight = state.weight + jnp.where(mine, self.rate * reward / self._chances(state), 0)
        return Pulls(count=state.count + mine, reward=state.reward + mine * reward, weight=weight - weight.max(),
                     round=state.round + 1)

    def _chances(self, state: Pulls) -> Array:
        return (1 - self.mix) * jax.nn.softmax(state.weight) + self.mix / state.weight.shape[0]


@struct
class Common(Struct):
    """`Bass`'s memory: the length `i32[]`, and whether it was cut last time, `i32[]`."""

    length: Array
    cut: Array


@dataclasses.dataclass(frozen=True)
class Bass:
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

    def init(self, of: Adaptive) -> Common:
        return Common(length=jnp.full((), min(self.start, max(of.lengths)), jnp.int32), cut=jnp.zeros((), jnp.int32))

    def choose(self, of: Adaptive, state: Common, s: State) -> Array:
        lengths = jnp.array(of.lengths)
        fits = jnp.where(lengths <= state.length, lengths, -1)
        return jnp.where(fits.max() >= 0, jnp.argmax(fits), jnp.argmin(lengths)).astype(jnp.int32)

    def update(self, of: Adaptive, state: Common, seen: Seen) -> Common:
        drafted = jnp.array(of.lengths)[seen.arm]
        grown = jnp.minimum(state.length + self.grow, max(of.lengths))
        cut = state.length - -(-state.length // self.shrink) - state.cut
        whole = seen.most >= drafted
        return Common(length=jnp.where(whole, grown, jnp.maximum(jnp.maximum(cut, seen.most), 1)),
                      cut=(~whole).astype(jnp.int32))
