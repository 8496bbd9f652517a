"""Speculative decoding: a source drafts, one forward pass of the target scores all drafts, and a verifier accepts some.

It follows Leviathan, Kalman, Matias (2023) and Chen et al. (2023) for chains and SpecInfer (Miao et al. 2024) for
trees, with any source of drafts and any verification rule. Rows of a batch may accept different numbers of drafts at no
cost, since rejected drafts are never written to the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from decodax.algorithms.speculative.contracts import propose, verified
from decodax.algorithms.speculative.drafter import Drafter
from decodax.algorithms.speculative.grown import Grown, Trimmed
from decodax.algorithms.speculative.source import Draft, Shape, SharesBudget, Source
from decodax.algorithms.speculative.tree import Proposal, Tree, tree, window
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.arguments import shown
from decodax.common.struct import short
from decodax.core.algorithm import ChecksFit, LearnsFromPrompt, Traits
from decodax.core.packing import Packing
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True)
class Speculative(LearnsFromPrompt, ChecksFit):
    """Speculative decoding: drafts are scored by the target in one forward pass, and a verifier accepts or rejects
    them.

    The guarantee is that of the verifier. The default, `SeedExact`, gives the tokens of plain sampling with the same
    seed.

    Attributes:
        draft: a `Draft`, which proposes chains or trees of its own, or a `Source`, which gives a distribution at any
            node of a tree that `shape` grows.
        verify: the rule that accepts drafts.
        shape: shape of the tree that a `Source` grows; default its own shape, or a chain. For a `Draft` it must be a
            chain, which limits the length of the drafts.
        packed: True: dense layers compute the tokens of all rows concatenated, without padding (EMS-SD: Ni et al.,
            2024). This is faster if rows have very different numbers of drafts, but takes longer to compile.

    Raises:
        ValueError: a shape other than a chain for a `Draft`.
    """

    __repr__ = short

    draft: Draft | Source
    verify: Verifier = SeedExact()
    shape: Shape | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        for name, given, of, takes in (
                ("draft", self.draft, (Draft, Source), "a Draft or a Source, such as decodax.drafts.PromptLookup()"),
                ("verify", self.verify, Verifier, "a Verifier, such as decodax.SeedExact()"),
                ("shape", self.shape, (Shape, type(None)), "a Shape, such as decodax.shapes.Chain(4), or None"),
                ("packed", self.packed, bool, "True or False")):
            if not isinstance(given, of):
                raise TypeError(f"{name}: got {shown(given)}, takes {takes}")
        if self.shape is not None and isinstance(self.draft, Draft) and not self.shape.is_chain:
            raise ValueError(f"shape: {type(self.draft).__name__} makes its own trees and takes at most a Chain, got "
                             f"{type(self.shape).__name__}")

    @functools.cached_property
    def traits(self) -> Traits:
        emits = self.drafter.length + 1     # the newest token, and the drafts that hold
        return Traits(f"Speculative({type(self.draft).__name__})", emits, commits=emits, needs=self.drafter.cache_needs,
                      window=1 + self.drafter.least_nodes,
                      guarantee=self.verify.guarantee if self.draft.exact else "approximate")

    @functools.cached_property
    def drafter(self) -> Draft:
        """The draft as an object with `propose`: a `Draft` as it is, and a `Source` combined with the shape of its
        trees."""
        draft = self.draft
        if isinstance(draft, Source):
            return Grown(draft, self.shape)
        return draft if self.shape is None else Trimmed(draft, min(self.shape.length, draft.length))

    def check_fit(self, model: Any, cache: Any) -> None:
        self.drafter.check_fit(model, cache)
        self.drafter.check_drawn(self.verify.drawn)
        self.verify.check_draft(self.draft, self.drafter.proposes)

    def init(self, params: Params, s: State) -> Any:
        return self.drafter.init(params, s), None

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        proposal, state = propose(self.drafter, params, policy, s, s.algo[0], self.verify.drawn)
        t = tree(s.newest, proposal, self.drafter.length)
        w = window(t, s.length - 1, s.running, proposal.probes, proposal.begun)
        return w.replace(hints=(*w.hints, self._packing(s.batch, w.width))) if self.packed else w, (state, t)

    def _packing(self, rows: int, width: int) -> Packing:
        form = self.drafter.form
        if isinstance(form, SharesBudget):
            return Packing((-(-(rows + form.batch_budget) // 8) * 8,), bounded=True)
        return Packing(tuple(dict.fromkeys(-(-rows * width // share // 8) * 8 for share in (4, 2))))

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        state, t = algo
        d = self.judge(dist, s, window, out, t)
        return d.replace(algo=(self.drafter.observe(params, s, window, out, d, state), None))

    def judge(self, dist: Distribution, s: State, window: Window, out: Out, t: Tree) -> Decision:
        """Decides which drafts are accepted; does not update the drafter's state.

        Args:
            dist: the policy's distribution at each node of the window.
            s: the state before the round.
            window: the window of drafts.
            out: the model's output for it.
            t: the drafts.
        """
        path, accepted, own = verified(self.verify, self.verify(
            dist if window.width == t.size else dist.first(t.size), s, t), s.batch, t.longest)
        index = jnp.arange(t.longest + 1, dtype=jnp.int32)
        drafts = take(t.tokens, jnp.concatenate([path[:, 1:], path[:, :1]], 1))
        tokens = jnp.where(index < accepted[:, None], drafts, own[:, None])
        # the newest token and the accepted drafts are true; the token that follows them opens the next window
        count = accepted + 1
        if (horizon := s.cache.max_commit()) is not None:      # further accepted tokens are drafted again
            count = jnp.minimum(count, horizon)
        on = (path[:, :, None] == jnp.arange(window.width)) & (index < count[:, None])[:, :, None]
        slots = jnp.where(on.any(1) & (tokens[:, :1] >= 0), window.positions, -1)
        return Decision(tokens=tokens, count=count, slots=slots, source=path, algo=None,
                        drafted=t.live[:, 1:].sum(1, dtype=jnp.int32), accepted=accepted)

    @property
    def prefill_observer(self) -> PromptReader | None:
        reader = self.drafter.prefill_observer
        return None if reader is None else PromptReader(reader)


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """The observer of a speculative method: passes each prefill chunk to the part of the drafter that learns from
    prompts (`Drafter.prefill_observer`), which updates the drafter's state."""

    reader: Drafter

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: Any) -> Any:
        return self.reader.observe(params, s, window, out, None, algo[0]), None


__all__ = ["Draft", "Proposal", "Source", "Speculative", "Tree"]
