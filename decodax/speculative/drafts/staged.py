"""Staged speculation (Spector and Ré, 2023): the draft model's own decoding is speculative.

The inner source drafts for the draft model, which verifies it by the round that everything here runs on; what comes
out is the draft model's chain, in fewer of its forwards. The published system also makes the outer draft a tree; here
it is a chain, as long as `length`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from decodax.cache import Window
from decodax.core.mesh import constrain, heads
from decodax.core.round import run
from decodax.core.state import State, Stats
from decodax.core.types import Decision, Out, Params
from decodax.speculative.drafts.model import DraftModel, catch_up
from decodax.speculative.source import Drawn
from decodax.speculative.tree import Proposal, chain
from decodax.struct import Struct, struct


@struct
class Stage(Struct):
    """`cache`: the draft model's, verified tokens only. `algo`: the state of its own speculation."""

    cache: Any
    algo: Any


@dataclasses.dataclass(frozen=True)
class Staged:
    """A chain of `length` tokens that `draft` decodes with drafts of `inner`.

    Attributes:
        draft: a `DraftModel`. inner: a `Speculative` algorithm with a seed-exact verifier.

    Raises:
        ValueError: a length below 1, an inner algorithm that is not seed-exact or whose window is wider than the outer.
    """

    draft: DraftModel
    inner: Any
    length: int = 7

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")
        if self.inner.guarantee != "seed-exact":
            raise ValueError(f"inner: keeps {self.inner.guarantee}, takes a seed-exact verifier: the chain must be the "
                             "draft model's own")
        if self.inner.emits > self.length + 1:
            raise ValueError(f"inner: drafts {self.inner.emits - 1} tokens for a chain of {self.length}, takes at most "
                             "as many")

    @property
    def weights(self) -> Any:
        return self.draft.weights, self.inner.weights

    def bare(self) -> Staged:
        return dataclasses.replace(self, draft=self.draft.bare(), inner=self.inner.bare())

    def init(self, params: Params, s: State) -> Stage:
        model, inner = _own(params)
        cache = self.draft.model.init_cache(s.batch, s.cache.capacity)
        return Stage(cache=constrain(cache, heads(cache)), algo=self.inner.init(Params(model, inner), s))

    def propose(self, params: Params, policy: Any, s: State, state: Stage, drawn: Drawn) -> tuple[Proposal, Stage]:
        if drawn not in ("coupled", "ranked"):
            raise ValueError("verify: Staged drafts with the target's uniforms and knows no q; takes SeedExact")
        model, inner = _own(params)
        draft = (self.draft if policy.vocab_size is None else self.draft.for_vocabulary(policy.vocab_size)).fitted
        cache = catch_up(draft, model, s, state.cache, self.draft.chunk, newest=1)
        zero = lambda: jnp.zeros_like(s.length)
        decided = jnp.zeros((s.batch, self.inner.emits + 1), jnp.int32)
        mine = s.replace(cache=cache, algo=state.algo, record=None, max_length=s.length + self.length,
                         stats=Stats(zero(), zero(), zero(), decided, zero()))
        done = run(self.inner, draft, Params(model, inner), policy, mine, self.length)
        index = s.length[:, None] + jnp.arange(self.length)
        tokens = jnp.take_along_axis(done.tokens, jnp.minimum(index, s.tokens.shape[1] - 1), 1)
        return chain(tokens, jnp.where(s.running, done.length - s.length, 0)), Stage(done.cache, done.algo)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Stage) -> Stage:
        if decision is None:
            return state.replace(algo=self.inner.observe(s, window, out, state.algo))
        # what the target did not accept is forgotten: entries beyond the length are not read, and written over
        known = s.length + decision.count - 1
        return state.replace(cache=state.cache.replace(length=jnp.minimum(state.cache.length, known)))


def _own(params: Params) -> tuple[Any, Any]:
    if params.draft is None:
        raise ValueError("params: Staged needs (draft model's weights, inner draft's weights) in Params.draft")
    return params.draft
