"""Runs draft model and target at the same time, each on its own half of a device mesh, in one compiled program.

The mesh has an axis `ROLE` of size 2. The devices at its first index run the target's forward pass and the
verification, those at the second one the draft model. A branch on the device's index decides, so neither half waits for
the other within a round. At the end of a round they exchange tokens: the new drafts, the accepted ones and the target's
own token. The verifiers allowed here draw by address, so no probabilities are exchanged; the authors of PEARL gather
the complete distributions of both models in each round.

A round takes max(draft, target) instead of draft + target, for drafts that are made one round ahead (`SpecBranch`, and
PEARL as its special case). The tokens are those of one device. The price is memory: since it is one program on all
devices, each half holds the weights and caches of both models, and other axes of the mesh shard them only within a
half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import AroundSource, Drafter, Form
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.model.specbranch import SpecBranch
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.tree import Drawn, Proposal, Tree
from decodax.algorithms.speculative.verifier import Verifier
from decodax.common.axes import DATA
from decodax.core.algorithm import Algorithm, name_of
from decodax.core.around import AroundModel
from decodax.core.cache import Cache
from decodax.core.round import run
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window
from decodax.sampling.distribution import Distribution
from decodax.sharding.lanes import GatheredLogits, divisible
from decodax.sharding.place import batch_specs

ROLE = "role"
"""Name of the mesh axis that separates the two halves: index 0 verifies, index 1 drafts."""

TARGET, DRAFT = 0, 1

T = TypeVar("T")


def apart(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
          mesh: Mesh) -> State:
    """Runs rounds as `decodax.core.round.run` does, with the draft model on one half of a mesh and the target on the
    other. Call it under `jax.jit` with all arguments placed on the mesh.

    Args:
        alg: `Speculative` with drafts that a `DraftModel` makes one round ahead: `algorithms.pearl(...)`,
            `algorithms.specbranch(...)`.
        model: the target.
        params: weights of the target and of the method.
        policy: the sampling policy.
        s: the state.
        max_rounds: largest number of rounds.
        mesh: a mesh with an axis "role" of size 2. Axes "data" and "model" shard rows and weights within each half;
            replicas along "data" end their loops independently, as in `lanes`.

    Returns:
        The state, equal on both halves, since the caches are exchanged at the end of a call.

    Raises:
        ValueError: another method, a mesh without the axis, or a cache whose rows share memory.
    """
    draft = alg.draft if isinstance(alg, Speculative) else None
    if not (isinstance(alg, Speculative) and isinstance(draft, SpecBranch) and isinstance(draft.source, DraftModel)):
        raise ValueError(f"alg: got {name_of(alg)}, takes Speculative with drafts that a draft model writes ahead: "
                         "Pearl or SpecBranch")
    if mesh.shape.get(ROLE) != 2:
        raise ValueError(f"mesh: got axes {dict(mesh.shape)}, takes one with an axis {ROLE!r} of size 2")
    divisible(s)
    source = draft.source
    if all(d.platform == "cpu" for d in mesh.devices.flat):     # see `lanes`
        model, source = GatheredLogits(model), dataclasses.replace(source, model=GatheredLogits(source.model))
    ahead: Any = dataclasses.replace(draft, source=source)
    split = dataclasses.replace(alg, draft=_Ahead(ahead), verify=_There(alg.verify))

    def both(params: Params, policy: Any, s: State, max_rounds: Array) -> State:
        s = run(split, _Target(model), params, policy, s, max_rounds)
        cache, states, record = _from(TARGET, (s.cache, s.policy, s.record))
        ahead, rest = s.algo
        return s.replace(cache=cache, policy=states, record=record,
                         algo=(ahead.replace(source=_from(DRAFT, ahead.source)), rest))

    whole = PartitionSpec()
    specs, chain = (batch_specs(s), batch_specs(policy)) if DATA in mesh.shape else (whole, whole)
    return jax.shard_map(both, mesh=mesh, in_specs=(whole, chain, specs, whole), out_specs=specs,
                         axis_names={ROLE, DATA} & set(mesh.shape), check_vma=False)(
                             params, policy, s, jnp.asarray(max_rounds, jnp.int32))


@dataclasses.dataclass(frozen=True)
class _Ahead(AroundSource, Draft):
    """The draft `source`, which makes drafts only on the draft model's half."""

    source: SpecBranch

    @property
    def length(self) -> int:
        return self.source.length

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        proposal, state = self.source.offer(params, s, state)
        write = lambda: self.source.write(params, policy, s, state, drawn)
        # the tree's buffer is made within the round: elsewhere there is an empty one
        return proposal, _only(DRAFT, write, state)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        draft = self.source
        state = state.replace(**_from(DRAFT, {name: getattr(state, name) for name in draft.written}))
        return draft.learn(params, s, window, out, decision, _from(TARGET, draft.look(out, decision)), state)


@dataclasses.dataclass(frozen=True)
class _There(Verifier):
    """The verifier `of`, run on the target's half; its result is sent to the other half."""

    of: Verifier

    @property
    def refuses(self) -> frozenset[Form]:       # type: ignore[override]
        return self.of.refuses

    def check_draft(self, draft: Drafter, proposes: frozenset[Form]) -> None:
        self.of.check_draft(draft, proposes)

    @property
    def guarantee(self) -> Any:         # type: ignore[override]
        return self.of.guarantee

    @property
    def drawn(self) -> Drawn:
        return self.of.drawn

    def __call__(self, dist: Distribution, s: State, tree: Tree) -> tuple[Array, Array, Array]:
        return _from(TARGET, _only(TARGET, lambda: self.of(dist, s, tree)))


@dataclasses.dataclass(frozen=True)
class _Target(AroundModel):
    """The model `base` on the target's half. The other half gets zeros and writes them to a copy of the cache that is
    never used."""

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        # a head may close over what a branch computes, so it is taken from a call beside it, whose rest is never run
        beside = self.base.apply(params, window, cache)

        def forward() -> tuple[Any, ...]:
            out = self.base.apply(params, window, cache)
            return out.hidden, out.entries, out.layers, out.streams

        hidden, entries, layers, streams = _only(TARGET, forward)
        return dataclasses.replace(beside, hidden=hidden, entries=entries, layers=layers, streams=streams)


def _only(role: int, fn: Callable[[], T], before: Any = None) -> T:
    """Returns `fn()` on the half with index `role`. The other half gets zeros, or the values of `before` where `fn`
    returns a leaf with the same path."""
    made = jax.eval_shape(fn)
    old = {} if before is None else {str(path): x for path, x in jax.tree_util.tree_leaves_with_path(before)}

    def idle() -> T:
        kept = lambda path, x: old[str(path)] if str(path) in old else jnp.zeros(x.shape, x.dtype)
        return jax.tree_util.tree_map_with_path(kept, made)

    return lax.cond(lax.axis_index(ROLE) == role, fn, idle)


def _from(role: int, tree: T) -> T:
    """Copies the values of the half with index `role` to both halves."""
    def one(x: Array) -> Array:
        bits = x.astype(jnp.int8) if x.dtype == bool else x
        there = jnp.where(lax.axis_index(ROLE) == role, bits, jnp.zeros_like(bits))
        return lax.psum(there, ROLE).astype(x.dtype)

    return jax.tree.map(one, tree)
