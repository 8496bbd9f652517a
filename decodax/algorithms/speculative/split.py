"""Dovetail: draft model and target in two programs, each on devices of its own, which may be of different kinds
("Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference", Zhang et al., 2024).

In the paper the draft model is on a small GPU and the target on the CPU. In each round of a loop on the host, one side
drafts and then the other verifies. Only tokens are exchanged: the drafts in one direction; in the other the target's
tokens, the number of accepted drafts and the finished rows. Neither side has weights or caches of the other. (In
`apart`, one program runs on both halves of a mesh at the same time.)

For a target on slow devices, each accepted draft saves much time, and each verified draft costs some. So the number of
drafts of a round is chosen by the costs of drafting and verifying windows of each size, measured on these devices
(`Split.measured`), and by the acceptance in the text so far. As in `Automatic`, the size with the least time for a
token is chosen.

Dovetail's own drafter is not implemented: a trained EAGLE head with dynamic gating fusion (DGF) of features and
embeddings. The draft is any draft model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decodax.algorithms.speculative.adaptive.automatic import Automatic
from decodax.algorithms.speculative.adaptive.controllers import Arms, RoundOutcome
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.drafts.model.draft_model import Drafting, DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.axes import constrain
from decodax.common.registry import FUNCTIONS
from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache, Feature
from decodax.core.mesh import auto_region, heads, on_mesh
from decodax.core.round import run
from decodax.core.state import State
from decodax.core.types import Decision, Model, Params
from decodax.sharding.place import place


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured durations in seconds of the two parts of a round, for each number of drafts; each includes the transfer
    of its result to the other part's devices.

    Attributes:
        draft: durations of drafting.
        verify: durations of verification.
    """

    draft: tuple[float, ...]
    verify: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(self.draft, self.verify, strict=True))


@struct
class DraftSide(Struct):
    """The data on the devices of the draft model.

    Attributes:
        weights: weights of the draft model.
        policy: the sampling policy.
        s: the text, as a state without the target's cache.
        state: state of the draft model, with its cache.
        control: state of the controller that chooses the number of drafts.
    """

    weights: Any
    policy: Any
    s: State
    state: Drafting
    control: Any


@struct
class Told(Struct):
    """The target's result of a round, as it is sent to the draft model.

    Attributes:
        tokens: `i32[B, K + 1]`, new tokens.
        count: `i32[B]`, number of new tokens.
        accepted: `i32[B]`, number of accepted drafts.
        running: `bool[B]`, True for rows that took part.
        status: `i32[B]`, status of the rows.
    """

    tokens: Array
    count: Array
    accepted: Array
    running: Array
    status: Array


@FUNCTIONS.register("algorithms.speculative.split.Split",
                    "Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference", "Zhang et al. 2024")
@dataclasses.dataclass(frozen=True)
class Split:
    """Speculative decoding with draft model and target in two programs, on devices that may be of different kinds
    (Zhang et al., 2024).

    Attributes:
        draft: the draft model; its weights are an argument of `begin`.
        lengths: numbers of drafts in a round to choose from, ascending; 0 is plain decoding.
        verify: a verifier that needs no distributions of the draft model, so that only tokens are exchanged.
        costs: durations of a round for each of `lengths`, from `measured`; with one length they are not needed.

    Raises:
        ValueError: a draft that is no draft model, a verifier that needs distributions, lengths that are not ascending
            numbers from 0 on, or costs for another number of lengths.

    Use it with a state `s` that was started and prefilled with `split.target` on the target's devices:

        side = split.begin(draft_weights, policy, s, devices) split, s, side = split.measured(model, weights, policy, s,
        side) s, side, lengths = split.advance(model, weights, policy, s, side, max_rounds=1000)
    """

    draft: DraftModel
    lengths: tuple[int, ...] = (0, 2, 4, 7)
    verify: Verifier = SeedExact()
    costs: Costs | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.draft, DraftModel):
            raise ValueError(f"draft: got {type(self.draft).__name__}, takes a DraftModel")
        if self.verify.drawn not in ("coupled", "ranked"):
            raise ValueError(f"verify: got {type(self.verify).__name__}, which compares distributions; takes one that "
                             "looks at tokens alone, such as SeedExact")
        ascending = list(self.lengths) == sorted(set(self.lengths))
        if not ascending or min(self.lengths, default=-1) < 0 or max(self.lengths) < 1:
            raise ValueError(f"lengths: got {self.lengths}, takes numbers from 0 on, ascending, one of them above 0")
        if self.costs is not None and not len(self.costs.draft) == len(self.costs.verify) == len(self.lengths):
            raise ValueError(f"costs: got those of {len(self.costs.draft)} and {len(self.costs.verify)} sizes, takes "
                             f"one of each for the {len(self.lengths)} lengths")

    @property
    def target(self) -> Speculative:
        """The algorithm that the target's devices run, with the largest number of drafts. Use it to make and prefill
        the decoding state."""
        return self._target(len(self.lengths) - 1)

    def begin(self, weights: Any, policy: Any, s: State, devices: Mesh | jax.Device) -> DraftSide:
        """Returns the draft model's side of a prefilled state. The draft model prefills the prompt in its first round.

        Args:
            weights: weights of the draft model, on `devices`.
            policy: the sampling policy.
            s: the prefilled state of the target.
            devices: a mesh, over whose axis "data" rows are split, or one device.

        Raises:
            ValueError: a mesh with Explicit axes; only the target's mesh may have these.
        """
        own = s.replace(cache=None, algo=None, record=None, stats=None)
        if isinstance(devices, Mesh) and set(devices.axis_types) != {AxisType.Auto}:
            raise ValueError(f"devices: got a mesh with axes of types {devices.axis_types}, takes Auto ones for the "
                             "draft model")
        where = NamedSharding(devices, PartitionSpec()) if isinstance(devices, Mesh) else devices
        put = lambda tree: jax.tree.map(lambda x: jax.device_put(x, where, may_alias=False), tree)
        policy, own = put(policy), put(own)
        if isinstance(devices, Mesh):
            policy, own = place(devices, policy), place(devices, own)
        with _on(own):
            state = _empty(self.draft.bare(), s.cache.capacity, weights, own)
            control = jax.device_put(self._controller.init(self._arms, s.batch), own.length.sharding)
        return DraftSide(weights=weights, policy=policy, s=own, state=state, control=control)

    def measured(self, model: Model, weights: Any, policy: Any, s: State, side: DraftSide,
                 repeats: int = 3) -> tuple[Split, State, DraftSide]:
        """Returns this object with measured costs, and the state and draft side after the measurement.

        The costs are medians of `repeats` rounds of each length, in turn, after one more for compilation. The tokens of
        these rounds are kept, since the text does not depend on the number of drafts.

        Raises:
            ValueError: all rows have finished before the end of the measurement.
        """
        seconds: list[list[tuple[float, float]]] = [[] for _ in self.lengths]
        for _ in range(repeats + 1):
            for index, of in enumerate(seconds):
                if not bool(s.running.any()):
                    raise ValueError(f"s: its rows have finished before {repeats + 1} rounds of each of the sizes "
                                     f"{self.lengths}, takes longer texts or fewer repeats")
                s, side, spent = self._round(index, model, weights, policy, s, side)
                of.append(spent)
        draft, verify = (tuple(statistics.median(x[part] for x in of[1:]) for of in seconds) for part in (0, 1))
        return dataclasses.replace(self, costs=Costs(draft, verify)), s, side

    def advance(self, model: Model, weights: Any, policy: Any, s: State, side: DraftSide,
                max_rounds: int) -> tuple[State, DraftSide, tuple[int, ...]]:
        """Runs rounds until all rows have finished, at most `max_rounds`. `s` and `side` are donated.

        Args:
            model: the target.
            weights: its weights.
            policy: the sampling policy, on the target's devices.
            s: the target's state.
            side: the draft model's side.
            max_rounds: largest number of rounds.

        Returns:
            The state, the draft model's side, and the number of drafts in each round.

        Raises:
            ValueError: there are several lengths and no costs.
        """
        if self.costs is None and len(self.lengths) > 1:
            raise ValueError(f"costs: got none for the sizes {self.lengths}; take those of Split.measured")
        chosen: list[int] = []
        while len(chosen) < max_rounds and bool(s.running.any()):
            with _on(side.s):
                index = int(_choose(self._controller, self._arms, side.control, side.s))
            s, side, _ = self._round(index, model, weights, policy, s, side)
            chosen.append(self.lengths[index])
        return s, side, tuple(chosen)

    def _round(self, index: int, model: Model, weights: Any, policy: Any, s: State,
               side: DraftSide) -> tuple[State, DraftSide, tuple[float, float]]:
        """Runs one round with `lengths[index]` drafts. Also returns the seconds that each side has taken."""
        arm, start = self._arm(index), time.perf_counter()
        with _on(side.s):
            tokens, live, state = _propose(arm, side.weights, side.policy, side.s, side.state)
        sent = jax.block_until_ready(jax.device_put((tokens, live), s.length.sharding))
        there = time.perf_counter()
        with _on(s):
            s, told = _verified(self._target(index), model, Params(weights), policy, s.replace(algo=(sent, None)))
        told = jax.block_until_ready(jax.device_put(told, side.s.length.sharding))
        back = time.perf_counter()
        with _on(side.s):
            text, state = _noted(arm, side.policy, side.s, state.cache, state.replace(cache=None), told)
            control = _learned(self._controller, self._arms, side.control, told, index)
        return s, side.replace(s=text, state=state, control=control), (there - start, back - there)

    @property
    def _controller(self) -> Automatic:
        return Automatic(self.costs.total if self.costs else (1.0,) * len(self.lengths))

    @property
    def _arms(self) -> Arms:
        return Arms(lengths=self.lengths, families=tuple(int(k > 0) for k in self.lengths),
                    on_paper=(False,) * len(self.lengths))

    def _arm(self, index: int) -> Speculative | None:
        """Returns the algorithm of the draft model's side for rounds with `lengths[index]` drafts; None for no
        drafts."""
        length = self.lengths[index]
        return Speculative(self.draft.bare(), self.verify, shape=Chain(length)) if length else None

    def _target(self, index: int) -> Speculative:
        return Speculative(_Sent(self.lengths[index]), self.verify)


@dataclasses.dataclass(frozen=True)
class _Sent(Draft):
    """Drafts received from the other side. The state has their tokens, `i32[B, K]`, and `bool[B, K]`, False for
    padding."""

    length: int
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def init(self, params: Params, s: State) -> tuple[Array, Array]:
        return jnp.zeros((s.batch, self.length), jnp.int32), jnp.zeros((s.batch, self.length), bool)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        return Proposal(tokens=state[0], live=state[1]), state


def _on(s: State) -> contextlib.AbstractContextManager[Any]:
    """Returns the context manager for the programs of a side: its mesh, if it has one."""
    where: Any = s.length.sharding
    mesh: Any = where.mesh if isinstance(where, NamedSharding) else None
    return on_mesh(mesh)


@functools.partial(jax.jit, static_argnums=(0, 1), keep_unused=True)
def _empty(draft: DraftModel, capacity: int, weights: Any, s: State) -> Drafting:
    # what is not read is kept, so that the cache lies where weights and text do
    cache = draft.model.init_cache(s.batch, capacity, params=weights)
    return Drafting(cache=constrain(cache, heads(cache)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _propose(arm: Speculative | None, weights: Any, policy: Any, s: State,
             state: Drafting) -> tuple[Array, Array, Drafting]:
    if arm is None:
        return jnp.zeros((s.batch, 0), jnp.int32), jnp.zeros((s.batch, 0), bool), state
    proposal, state = arm.drafter.propose(Params(None, weights), policy, s, state, arm.verify.drawn)
    return proposal.tokens, proposal.live, state


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _verified(alg: Speculative, model: Model, params: Params, policy: Any, s: State) -> tuple[State, Told]:
    new = run(alg, model, params, policy, s, 1)

    def tell(new: State, s: State) -> Told:
        at = jnp.minimum(s.length[:, None] + jnp.arange(alg.traits.emits, dtype=jnp.int32), s.tokens.shape[1] - 1)
        return Told(tokens=jnp.take_along_axis(new.tokens, at, 1), count=new.length - s.length,
                    accepted=new.stats.accepted - s.stats.accepted, running=s.running, status=new.status)

    plain = lambda s: s.replace(cache=None, algo=None, policy=None, record=None)
    return new, auto_region(tell, plain(new), plain(s))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _noted(arm: Speculative | None, policy: Any, s: State, cache: Cache, rest: Drafting,
           told: Told) -> tuple[State, Drafting]:
    """Returns the draft side's text with the new tokens, and its state with those cache entries of accepted drafts.
    `rest` is the state from the round without its cache."""
    state = rest.replace(cache=cache)
    index = jnp.arange(told.tokens.shape[1], dtype=jnp.int32)
    new = index < told.count[:, None]
    if arm is not None:
        # the newest token and the drafts that hold, as the target keeps them; its own token opens the next window
        slots = jnp.where(new, s.length[:, None] - 1 + index, -1)
        decision = Decision(tokens=told.tokens, count=told.count, slots=slots, source=jnp.zeros_like(slots), algo=None)
        unread: Any = None      # a draft model learns from the decision alone
        state = arm.drafter.observe(unread, s, unread, unread, decision, state)
    at = jnp.where(new, s.length[:, None] + index, s.tokens.shape[1])
    tokens = s.tokens.at[jnp.arange(s.batch)[:, None], at].set(told.tokens, mode="drop")
    return s.replace(tokens=tokens, length=s.length + told.count, status=told.status,
                     policy=_moved(policy, s.policy, told)), state


def _moved(policy: Any, states: Any, told: Told) -> Any:
    """Returns the policy's states, of which those tracked along drafts are advanced by the new tokens."""
    def visit(here: Any, told: tuple[Array, Array]) -> tuple[Any, None]:
        token, written = told
        behind = policy.follow(jax.tree.map(lambda x: x[:, None], here), token[:, None])
        keep = lambda new, old: jnp.where(written.reshape(-1, *[1] * (old.ndim - 1)), new[:, 0], old)
        return jax.tree.map(keep, behind, here), None

    written = jnp.arange(told.tokens.shape[1]) < told.count[:, None]
    moved = jax.lax.scan(visit, policy.drafted(states), (told.tokens.T, written.T))[0]
    return tuple(state if new is None else new for state, new in zip(states, moved, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _choose(controller: Automatic, of: Arms, control: Any, s: State) -> Array:
    return controller.choose(of, control, s)


@functools.partial(jax.jit, static_argnums=(0, 1, 4), donate_argnums=2)
def _learned(controller: Automatic, of: Arms, control: Any, told: Told, index: int) -> Any:
    depth, running = jnp.arange(1, of.longest + 1), told.running[:, None]
    length = of.lengths[index]
    seen = RoundOutcome(arm=index, running=told.running, tokens=told.accepted + 1, accepted=told.accepted,
                        tried=running & (depth <= told.accepted[:, None] + 1) & (depth <= length),
                        held=running & (depth <= told.accepted[:, None]))
    return controller.update(of, control, seen)
