"""Parallel prompt decoding: trained prompt tokens after each draft let the target predict further tokens in the forward
pass that verifies ("Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference", Chen
et al., 2024).

Every node of the draft tree has prompt tokens of its own. Those of the last accepted node give the next round's
guesses, so drafting has no forward pass and no weights but their embeddings. A prompt token may be an ensemble of
embeddings, whose logits are averaged. With `SparseTrees` nodes differ in the number of their prompt tokens, and that of
a row's last node decides its next tree; otherwise every node has all of them. Training: distance to the target's own
distribution, at places of a text (`decodax.train.drafting.prompt_tokens`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain, Fixed
from decodax.algorithms.speculative.heads.prompted.source import PromptTokens
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.tree import Probes, Proposal
from decodax.algorithms.speculative.trees.sparse_trees import DepthState, SparseTrees
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@struct
class SparselyPrompted(DepthState):
    """State of `SparsePromptTokens`.

    Attributes:
        known: `i32[B]`, number of prompt tokens of each row's last accepted token; 1 before the first round.
        hidden: that of `Prompted`; entries from `known` on repeat the last one.
    """

    hidden: Array


@dataclasses.dataclass(frozen=True)
class SparsePromptTokens(PromptTokens):
    """Drafts at prompt tokens, with a tree and numbers of prompt tokens for each state of a row.

    Attributes:
        trees: the trees.

    The others are those of `PromptTokens`.

    Raises:
        ValueError: `trees` has not a tree for each prompt token.
    """

    __repr__ = short

    trees: SparseTrees = dataclasses.field(kw_only=True)
    knows_depth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.trees.trees) != self.head.heads:
            raise ValueError(f"shape: got SparseTrees of {len(self.trees.trees)} states, and the drafter has "
                             f"{self.head.heads} prompt tokens; takes as many")

    @property
    def shape(self) -> SparseTrees:
        return self.trees

    def init(self, params: Params, s: State) -> SparselyPrompted:   # type: ignore[override]
        return SparselyPrompted(known=jnp.ones(s.batch, jnp.int32), hidden=super().init(params, s).hidden)

    def probes(self, params: Params, s: State, state: Any, proposal: Proposal) -> Probes:
        row, t = state.known - 1, PromptPlan(self.trees, self.head.ensemble)
        vectors, _ = self.head.inputs(params.draft.head, jnp.zeros((1, 1), jnp.int32))
        assert vectors is not None
        return Probes(tokens=jnp.zeros((s.batch, t.size), jnp.int32), sees=jnp.asarray(t.sees)[row],
                      offset=jnp.asarray(t.offset)[row], embeddings=vectors[jnp.asarray(t.probe)[row]])

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        if decision is None or window.embedded is None:
            return state                    # of a window that another drafter has proposed
        row, t, E = state.known - 1, PromptPlan(self.trees, self.head.ensemble), self.head.ensemble
        last = jnp.maximum(decision.count - 1, 0)[:, None]
        node = jnp.maximum(jnp.take_along_axis(decision.source, last, 1), 0)[:, 0]
        known = jnp.asarray(t.prompts)[row, node]
        depth, member = np.divmod(np.arange(self.head.heads * E), E)
        at = jnp.minimum(depth, known[:, None] - 1) * E + member
        found = take(out.hidden, 1 + self.trees.nodes + jnp.asarray(t.first)[row, node][:, None] + at)
        on = decision.count > 0
        return SparselyPrompted(known=jnp.where(on, known, state.known), hidden=jnp.where(
            on[:, None, None], found.reshape(state.hidden.shape), state.hidden))


class PromptPlan:
    """The prompt tokens of sparse trees, for each state. Ensembles of E embeddings have E nodes.

    Attributes:
        size: number of their nodes `P` in a window.
        prompts: `i32[K, 1 + N]`, number of prompt tokens after each node; 1 for padding.
        first: `i32[K, 1 + N]`, the first of their nodes.
        probe: `i32[K, P]`, the embedding of each node.
        offset: `i32[K, P]`, see `Probes`.
        sees: `bool[K, P, 1 + N + P]`, see `Probes`.
    """

    def __init__(self, trees: SparseTrees, ensemble: int):
        K, N, E = len(trees.trees), trees.nodes, ensemble
        self.size = P = E * max(sum(t.prompts) for t in trees.trees)
        self.prompts, self.first = np.ones((K, 1 + N), np.int32), np.zeros((K, 1 + N), np.int32)
        self.probe, self.offset = np.zeros((K, P), np.int32), np.zeros((K, P), np.int32)
        self.sees = np.zeros((K, P, 1 + N + P), bool)
        for k, t in enumerate(trees.trees):
            order, at = [(), *Fixed(t.paths).order], 0
            for node, (path, count) in enumerate(zip(order, t.prompts, strict=True)):
                self.prompts[k, node], self.first[k, node] = count, at
                above = [order.index(path[:i]) for i in range(len(path) + 1)]
                for j in range(count):
                    for e in range(E):
                        one = at + j * E + e
                        self.probe[k, one], self.offset[k, one] = j * E + e, len(path) + 1 + j
                        self.sees[k, one, above] = True
                        self.sees[k, one, 1 + N + at + e:1 + N + one + 1:E] = True
                at += count * E


@ALGORITHMS.register("ppd",
                     "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference",
                     "Chen et al. 2024", family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def ppd(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts with the target itself, by trained prompt tokens after each draft.

    A few embeddings are all that is trained and kept in memory. Forward passes are wide: each draft takes its prompt
    tokens along.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree, such as the paper's, `dx.trees.SparseTrees`; None: a chain with a draft for each
            prompt token.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = PromptTokens.trained(lm, draft, "ppd")
    if isinstance(shape, SparseTrees):
        return Speculative(SparsePromptTokens(source.head, source.weights, trees=shape), verify or SeedExact())
    return Speculative(source, verify or SeedExact(), shape or Chain(source.longest))


__all__ = ["SparsePromptTokens", "ppd"]
