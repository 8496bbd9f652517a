"""SpecInfer: merges the trees of several draft models into one ("SpecInfer: Accelerating Large Language Model Serving
with Tree-based Speculative Inference and Verification", Miao et al., 2024).

Each source grows a tree of its own after the newest token, and the trees are merged: nodes with equal tokens and equal
prefixes become one, with the children of all of them. So a draft of one source may continue a draft of another.

All draws remain valid. A node that two sources drew is in the window once for each of them, with its children below the
first. `MultiRound(replacement=True)`, the paper's multi-step speculative sampling, tests each draw against the
distribution from which it was drawn, and the output has the target's distribution. Sources draw with independent noise.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import TREES, Form
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain, Fixed
from decodax.algorithms.speculative.source import Draft, Grower, Source, fitted
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@dataclasses.dataclass(frozen=True)
class Merged(Draft):
    """Drafts the merged trees of several sources (SpecInfer).

    Attributes:
        sources: two or more sources, such as `DraftModel`s.
        shape: shape of the tree of each.

    Raises:
        ValueError: fewer than two sources, or drafts that make their own trees; or, before tracing, a verifier that
            needs siblings drawn without replacement.
    """

    sources: tuple[Source, ...]
    shape: Fixed = Chain(4)
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees", "draws", "mixtures"))

    def __post_init__(self) -> None:
        if len(self.sources) < 2:
            raise ValueError(f"sources: got {len(self.sources)}, takes two or more")
        if own := [type(x).__name__ for x in self.sources if isinstance(x, Draft)]:
            raise ValueError(f"sources: {own[0]} makes its own trees, takes Sources")

    @property
    def length(self) -> int:
        return self.shape.length

    if not TYPE_CHECKING:       # of a class variable

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return TREES.union(*(source.cache_needs for source in self.sources))

    def init(self, params: Params, s: State) -> Any:
        return tuple(source.init(own, s) for source, own in zip(self.sources, self._own(params), strict=True))

    def check_drawn(self, drawn: Drawn) -> None:
        if drawn == "distinct":
            raise ValueError("verify: Merged takes MultiRound(replacement=True) or SeedExact: what several sources "
                             "draw together is not drawn without replacement")
        for source in self.sources:
            source.check_drawn(drawn)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        self.check_drawn(drawn)
        grown = [self.shape.grow(Grower(fitted(source, policy.vocab_size), own, policy, s, drawn, stream=i), x)
                 for i, (source, own, x) in enumerate(zip(self.sources, self._own(params), state, strict=True))]
        n, above = len(self.shape.paths), self.shape.parents
        joined = lambda get: jnp.concatenate([get(p) for p, _, _ in grown], 1)
        tokens, live = joined(lambda p: p.tokens), joined(lambda p: p.live)
        parents = np.concatenate([np.where(above > 0, above + i * n, 0) for i in range(len(grown))])
        first = self.first_of_prefix(tokens, live, parents)
        log_q = drawn_at = None
        if grown[0][0].log_q is not None:
            log_q = joined(lambda p: p.log_q)
            drawn_at = np.concatenate([above + i * grown[0][0].log_q.shape[1] for i in range(len(grown))])
        # a source's keys of a merged node are committed with the first node of its prefix
        merged = lambda nodes, i: jnp.where(nodes > 0, first[:, np.where(nodes[0] > 0, nodes[0] + i * n, 0)], -1)
        states = tuple(source.place(x, merged(nodes, i))
                       for i, (source, (_, x, nodes)) in enumerate(zip(self.sources, grown, strict=True)))
        return Proposal(tokens=tokens, live=live, parents=take(first, jnp.broadcast_to(parents, tokens.shape)),
                        log_q=log_q, drawn_at=drawn_at), states

    def first_of_prefix(self, tokens: Array, live: Array, parents: np.ndarray) -> Array:
        """Finds duplicates among the merged draft trees: returns for each node (0 is the newest token) the first node
        at the end of an equal sequence of tokens, `i32[B, 1 + N]`; the node itself if it is no duplicate."""
        depths = np.tile([len(path) for path in self.shape.order], len(self.sources))
        first = jnp.zeros((tokens.shape[0], 1 + tokens.shape[1]), jnp.int32)
        for depth in range(1, self.length + 1):
            level = np.flatnonzero(depths == depth)
            up, token, on = first[:, parents[level]], tokens[:, level], live[:, level]
            same = lambda x: x[:, :, None] == x[:, None]
            equal = (same(up) & same(token) & on[:, :, None] & on[:, None]) | np.eye(len(level), dtype=bool)
            first = first.at[:, 1 + level].set(jnp.asarray(1 + level, jnp.int32)[jnp.argmax(equal, 2)])
        return first

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return tuple(source.observe(own, s, window, out, decision, x)
                     for source, own, x in zip(self.sources, self._own(params), state, strict=True))

    def _own(self, params: Params) -> list[Params]:
        each = params.draft or (None,) * len(self.sources)
        return [params.replace(draft=own) for own in each]


@ALGORITHMS.register("specinfer", "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative "
                     "Inference and Verification", "Miao et al. 2024", family="speculative-tree", needs="a draft model",
                     guarantee="distribution-exact")
def specinfer(draft: Any, branching: tuple[Count, ...] = (3, 2, 1), verify: Verifier | None = None) -> Speculative:
    """Merges the draft trees of one or several draft models, and verifies them by multi-round rejection sampling.

    Several small draft models together propose more of the target's likely tokens than each alone.

    Args:
        draft: the draft model, or a tuple of draft models.
        branching: number of children of each node, by level.
        verify: the rule that accepts drafts; None: multi-round rejection sampling of draws with replacement.
    """
    models = tuple(map(DraftModel, draft if isinstance(draft, (tuple, list)) else (draft,)))
    shape, rule = Fixed.balanced(*branching), verify or MultiRound(replacement=True)
    return Speculative(models[0] if len(models) == 1 else Merged(models, shape), rule,
                       shape if len(models) == 1 else None)
