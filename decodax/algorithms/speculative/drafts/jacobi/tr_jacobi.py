"""TR-Jacobi: Jacobi decoding with a tree of guesses and a retrieved continuation ("Make Some Noise: Unlocking Language
Model Parallel Inference Capability through Noisy Training", Wang et al., 2024).

Each round scores the newest token, a tree of guesses, and the tokens that followed the last n-gram at an earlier place
of the text. The rejected nodes after the last accepted one predict the following positions after wrong inputs, as in
Jacobi decoding; their most likely tokens are the guesses of the next round, the same ones at all nodes of a depth.
Positions without such a node get noise: tokens at random positions of the text. Models that were tuned with noise
(`decodax.train.tuning.NoisyLoss`) are often right there; for others `jacobi` and `lookahead` take narrower windows.

As in the authors' code (wyxstriker/MakeSomeNoiseInference at 9795cd2): Medusa's tree of 63 nodes over ten candidates
for each of four positions, a chain of five retrieved tokens after an n-gram of at most three, and the first of several
places with equally long matches. Where several paths agree with the text equally far, that code takes the rejected
nodes of the first path in its list, here those of the most likely guesses. It retrieves nothing before the second
round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.jacobi.jacobi import filling
from decodax.algorithms.speculative.drafts.text.history import following, known, matched, tail
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.published import MEDUSA_63
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k


@dataclasses.dataclass(frozen=True)
class TRJacobi(Draft):
    """Drafts a tree of Jacobi guesses beside a retrieved chain (Wang et al., 2024). Its state is the guesses of the
    next positions, `i32[B, D, k]` with the most likely first, -1 for none.

    Attributes:
        tree: the tree of guesses; a node's last rank says which guess of its depth it is.
        retrieved: largest number of retrieved tokens.
        ngram: length of the longest n-gram that is looked up.

    Raises:
        ValueError: a number below 1.
    """

    tree: Fixed = MEDUSA_63
    retrieved: int = 5
    ngram: int = 3
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        if self.retrieved < 1 or self.ngram < 1:
            raise ValueError(f"retrieved, ngram: got {self.retrieved} and {self.ngram}, take at least 1")

    @property
    def fanout(self) -> int:
        """Number `k` of guesses for each position: the number of ranks in the tree, one more than the largest."""
        return 1 + max(max(path) for path in self.tree.paths)

    @property
    def last(self) -> int:
        """Rank of the chain of retrieved tokens among the children of the newest token: it comes after all nodes of the
        tree."""
        return sum(len(path) == 1 for path in self.tree.paths)

    @property
    def form(self) -> Fixed:
        """The shape of all drafts: the tree of guesses, and beside it the chain of retrieved tokens."""
        return Fixed((*self.tree.paths, *((self.last, *(0,) * i) for i in range(self.retrieved))))

    @property
    def length(self) -> int:
        return max(self.tree.length, self.retrieved)

    def init(self, params: Params, s: State) -> Array:
        return jnp.full((s.batch, self.tree.length, self.fanout), -1, jnp.int32)

    def propose(self, params: Params, policy: Any, s: State, state: Array, drawn: Drawn) -> tuple[Proposal, Array]:
        form, text = self.form, known(s)
        noise = filling("text", s, self.tree.length * self.fanout).reshape(state.shape)
        guesses = jnp.where(state >= 0, state, noise)
        match = matched(text, tail(s, self.ngram))
        first = jnp.argmax(match, 1)[:, None]           # of the longest matches
        after = jnp.where(match.any(1)[:, None], following(text, first, self.retrieved)[:, 0], -1)
        drafts = jnp.stack([after[:, len(path) - 1] if path[0] == self.last else guesses[:, len(path) - 1, path[-1]]
                            for path in form.order], 1)
        return Proposal(tokens=jnp.maximum(drafts, 0), live=drafts >= 0, parents=form.parents[None]), state

    @property
    def _below(self) -> np.ndarray:
        """For each window node the most likely nodes after it, one for each depth, `i32[1 + N, D]`, padded with -1."""
        order, depth = self.form.order, self.tree.length
        node = {path: i + 1 for i, path in enumerate(order)}
        return np.array([[node.get((*path, *(0,) * (i + 1)), -1) for i in range(depth)] for path in ((), *order)],
                        np.int32)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Array) -> Array:
        if decision is None:
            return state
        below = self._below
        end = jnp.take_along_axis(decision.source, jnp.maximum(decision.count - 1, 0)[:, None], 1)[:, 0]
        nodes = jnp.asarray(below)[jnp.minimum(end, len(below) - 1)]
        at = jnp.clip(nodes, 0, window.width - 1)
        position = s.length[:, None] - 1 + decision.count[:, None] + jnp.arange(nodes.shape[1], dtype=jnp.int32)
        # another draft's window may have other nodes there
        there = (nodes >= 0) & (nodes < window.width) & take(window.live, at) & (take(window.positions, at) == position)
        logits = out.logits(at)
        likely = top_k(logits, min(self.fanout, logits.shape[-1]))[1].astype(jnp.int32)
        likely = jnp.pad(likely, ((0, 0), (0, 0), (0, self.fanout - likely.shape[-1])), constant_values=-1)
        return jnp.where(there[..., None], likely, -1)


@ALGORITHMS.register("tr-jacobi", "Make Some Noise: Unlocking Language Model Parallel Inference Capability through "
                     "Noisy Training", "Wang et al. 2024", family="parallel-jacobi", guarantee="seed-exact")
def tr_jacobi(retrieved: Count = 5, ngram: Count = 3, tree: Fixed = MEDUSA_63,
              verify: Verifier = SeedExact()) -> Speculative:
    """Iterates a tree of the target's own guesses, beside the tokens that followed the last n-gram in the text.

    For models that were tuned with noise (`scripts/train.py tune --objective msn`).

    Args:
        retrieved: largest number of retrieved tokens.
        ngram: length of the longest n-gram that is looked up.
        tree: the tree of guesses.
        verify: the rule that accepts drafts.
    """
    return Speculative(TRJacobi(tree, retrieved, ngram), verify)


__all__ = ["TRJacobi"]
