"""Several ways to draft, one of them picked for each round: how long, from which source, or not at all.

An *arm* is a `Speculative` algorithm; `NOTHING` is the arm that drafts nothing. All arms look at every round, whoever
drafted it. The choice is one for the batch, since the window's shape is: with `SeedExact` the tokens do not depend on
it, with the other verifiers their distribution does not.

While nothing is drafted, drafts that are merely read off the text (`free`) are tried on paper: now and then one is
noted and compared with what plain decoding writes. That tells their acceptance at no cost but the lookup's, where a
real trial costs a wider window.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache import Window, take
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


@struct
class Paper(Struct):
    """Drafts that are compared with plain decoding's tokens, without a forward of their own.

    Attributes:
        tokens: `i32[B, K]`, -1 beyond the draft. next: `i32[B]` which of them the next token is compared with.
        held: `bool[B]` all before it held; False before the first draft.
    """

    tokens: Array
    next: Array
    held: Array


EVERY = 8
"""Rounds between lookups of drafts on paper: small beside what the rounds themselves cost, even of a tiny model."""


class Controller(Protocol):
    """A rule that picks arms: a frozen dataclass, static under jit. Its state is the batch's and has no batch axis.

    One that also has `note(of, state, seen)` is told of drafts that were tried on paper.
    """

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
        ValueError: no arms, arms whose verifiers keep different guarantees, or drafts that differ in weights alone (a
            corpus, a model's parameters): programs could not tell them apart.
    """

    arms: tuple[Speculative, ...]
    controller: Controller
    caches = True

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms: got none, takes one or more")
        if len(kinds := {arm.guarantee for arm in self.arms if arm != NOTHING}) > 1:
            raise ValueError(f"arms: keep different guarantees ({', '.join(sorted(kinds))}), takes one")
        told: dict[Any, Any] = {}
        for draft in (arm.draft for arm in self.arms):
            if (other := told.setdefault(draft.bare(), draft)) is not draft and not _same(other.weights, draft.weights):
                raise ValueError(f"arms: got two {type(draft).__name__} that differ in their weights alone, takes arms "
                                 "that differ in another option too, or share the weights")

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
        return _rows(self.controller.init(self), s.batch), tuple(states), tuple(self._papers(s.batch))

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return self.controller.choose(self, _first(s.algo[0]), s)

    def observe(self, s: State, window: Window, out: Out, algo: Any) -> Any:
        return algo[0], self._tell(s, window, out, None, algo[1]), algo[2]

    @functools.cached_property
    def free(self) -> tuple[int, ...]:
        """Arms whose drafts are tried on paper: the longest of each draft."""
        if NOTHING not in self.arms or not hasattr(self.controller, "note"):
            return ()
        longest = {arm.draft: i for i, arm in sorted(enumerate(self.arms), key=lambda x: x[1].emits)
                   if getattr(arm.draft, "free", False)}
        return tuple(longest.values())

    def _papers(self, batch: int) -> list[Paper]:
        return [Paper(tokens=jnp.full((batch, self.arms[i].emits - 1), -1, jnp.int32), next=jnp.zeros(batch, jnp.int32),
                      held=jnp.zeros(batch, bool)) for i in self.free]

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
        control, states, papers = s.algo
        own = self.adaptive.drafts.index(self.arm.draft)
        window, (state, tree) = self.arm.propose(self.adaptive._own(params, self.arm.draft), policy,
                                                 s.replace(algo=(states[own], None)))
        if self.arm == NOTHING:
            papers = tuple(self._renew(i, params, policy, s, paper)
                           for i, paper in zip(self.adaptive.free, papers, strict=True))
        return window, ((control, tuple(state if i == own else x for i, x in enumerate(states)), papers), tree)

    def _renew(self, index: int, params: Params, policy: Any, s: State, paper: Paper) -> Paper:
        arm, K = self.adaptive.arms[index], paper.tokens.shape[1]
        over = ~paper.held | (paper.next >= K)
        due = (s.running & over).any() & (s.stats.rounds.max() % EVERY == 0)

        def look() -> Paper:
            at = self.adaptive.drafts.index(arm.draft)
            found, _ = arm.drafter.propose(self.adaptive._own(params, arm.draft), policy, s, s.algo[1][at],
                                           arm.verify.drawn)
            tokens = jnp.where(over[:, None], jnp.where(found.live, found.tokens, -1), paper.tokens)
            return Paper(tokens=tokens, next=jnp.where(over, 0, paper.next), held=over | paper.held)

        return lax.cond(due, look, lambda: paper)

    def _compare(self, control: Any, papers: Any, s: State, d: Decision, seen: Seen) -> tuple[Any, Any]:
        """What the drafts on paper show after this round. One in which others drafted is no test for them: it ends."""
        if self.arm != NOTHING:
            return control, tuple(paper.replace(held=jnp.zeros_like(paper.held)) for paper in papers)
        renewed = []
        for index, paper in zip(self.adaptive.free, papers, strict=True):
            K = paper.tokens.shape[1]
            tried = paper.held & (paper.next < K) & s.running
            held = tried & (take(paper.tokens, jnp.minimum(paper.next, K - 1)[:, None])[:, 0] == d.tokens[:, 0])
            at = paper.next[:, None] == jnp.arange(self.emits - 1)
            total = lambda hit, at=at: (hit[:, None] & at).sum(0).astype(jnp.float32)
            control = self.adaptive.controller.note(                                            # type: ignore[attr-defined]
                self.adaptive, control, seen.replace(arm=jnp.asarray(index, jnp.int32), tried=total(tried),
                                                     held=total(held)))
            renewed.append(paper.replace(next=paper.next + 1, held=held))
        return control, tuple(renewed)

    def decide(self, policy: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        (control, states, papers), tree = algo
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
        controller = self.adaptive.controller.update(self.adaptive, _first(control), seen)
        controller, papers = self._compare(controller, papers, s, d, seen)
        return d.replace(tokens=wide[0], source=wide[1], algo=(_rows(controller, s.batch), states, papers))

    def observe(self, s: State, window: Window, out: Out, algo: Any) -> Any:
        return self.adaptive.observe(s, window, out, algo)


def _same(a: Any, b: Any) -> bool:
    """Whether the weights of two drafts that are otherwise equal are the same arrays."""
    equal = lambda x, y: x is y or (isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and np.array_equal(x, y))
    one, other = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(one) == len(other) and all(map(equal, one, other))


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
        wait: `i32[]` rounds until drafts that were given up are probed again.
        probes: `i32[]` how often they failed in a row, at least 1 once they were tried; 0 before.
    """

    tried: Array
    held: Array
    wait: Array
    probes: Array


@dataclasses.dataclass(frozen=True)
class Automatic:
    """Picks the arm of the most expected tokens a second, from measured costs and the acceptance seen by depth.

    Expected tokens of an arm of length K are 1 + sum over k of the product of the first k acceptance rates. Drafts that
    are free to try on paper start when they are seen to hold there. Others are tried until they are seen to fail, and
    then probed so rarely that it costs `probing` of the time, ever more rarely, at least every `patience` rounds.

    Attributes:
        costs: seconds of a round of each arm (or any other unit), as `measure` finds them for a batch size.
        memory: rounds after which an observation weighs 1/e.
        probing: share of the time that goes into probes of drafts that were given up.
        patience: the longest wait between probes.

    Raises:
        ValueError: a cost, memory, share or patience that is not positive.
    """

    costs: tuple[float, ...]
    memory: float = 32.0
    probing: float = 0.01
    patience: int = 1024

    def __post_init__(self) -> None:
        for name, value in (("costs", min(self.costs, default=0)), ("memory", self.memory), ("probing", self.probing),
                            ("patience", self.patience)):
            if value <= 0:
                raise ValueError(f"{name}: got {value}, takes numbers above 0")

    def init(self, of: Adaptive) -> Rates:
        if len(of.arms) != len(self.costs):
            raise ValueError(f"costs: got {len(self.costs)} for {len(of.arms)} arms")
        # half an imagined draft, of which three quarters hold; of one that is tried on paper first, a fifth
        tried = jnp.full((len(of.arms), of.emits - 1), 0.5, jnp.float32)
        free = jnp.array(self._free(of))[:, None] & (jnp.arange(of.emits - 1) == 0)
        return Rates(tried=tried, held=tried * jnp.where(free, 0.2, 0.75), wait=jnp.zeros((), jnp.int32),
                     probes=jnp.zeros((), jnp.int32))

    def choose(self, of: Adaptive, state: Rates, s: State) -> Array:
        arms, lengths = jnp.arange(len(of.arms)), jnp.array(of.lengths)
        rate = state.held / jnp.maximum(state.tried, 1e-6)
        tokens = 1 + jnp.cumsum(jnp.cumprod(rate, 1), 1)
        tokens = jnp.concatenate([jnp.ones((len(of.arms), 1)), tokens], 1)[arms, lengths]
        speed = tokens / jnp.array(self.costs, jnp.float32)
        best = jnp.argmax(speed)
        costly = (lengths > 0) & ~jnp.array(self._free(of))
        probe = (lengths[best] == 0) & (state.wait <= 0) & (state.probes > 0) & costly.any()
        return jnp.where(probe, jnp.argmax(jnp.where(costly, speed, -1)), best).astype(jnp.int32)

    def update(self, of: Adaptive, state: Rates, seen: Seen) -> Rates:
        lengths, costs = jnp.array(of.lengths), jnp.array(self.costs, jnp.float32)
        plain = jnp.where(lengths == 0, costs, jnp.inf).min()
        extra = jnp.where(jnp.isfinite(plain), jnp.maximum(costs[seen.arm] / plain - 1, 0), 0)
        drafted = lengths[seen.arm] > 0
        failed = drafted & (seen.held[:1].sum() == 0)
        probes = jnp.where(failed, jnp.minimum(state.probes + 1, 16), jnp.where(drafted, 0, state.probes))
        wait = jnp.minimum(extra / self.probing * 2.0 ** (probes - 1), self.patience).astype(jnp.int32)
        state = state.replace(wait=jnp.where(drafted, wait, state.wait - 1), probes=jnp.maximum(probes, drafted))
        return self.note(of, state, seen)

    def note(self, of: Adaptive, state: Rates, seen: Seen) -> Rates:
        """Adds what was seen of an arm's drafts to the rates of all arms with the same draft."""
        family = jnp.array([of.drafts.index(arm.draft) for arm in of.arms])
        same = (family == family[seen.arm])[:, None] & (seen.tried > 0)
        fade = jnp.where(same, jnp.exp(-1 / self.memory), 1.0)
        add = lambda x, new: x * fade + jnp.where(same, new / jnp.maximum(seen.rows, 1), 0)
        return state.replace(tried=add(state.tried, seen.tried), held=add(state.held, seen.held))

    def _free(self, of: Adaptive) -> list[bool]:
        return [arm.draft in [of.arms[i].draft for i in of.free] for arm in of.arms]


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
