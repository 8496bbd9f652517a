"""The MLP speculator: a small recurrent network on the target's last hidden state and the drafted tokens ("Accelerating
Production LLMs with Combined Token/Embedding Speculators", Wertheimer et al., 2024)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.window import take


@dataclasses.dataclass(frozen=True)
class LikeliestPaths(Shape):
    """The tree of the most likely of all paths through a tree of fixed numbers of children, as in the code of the MLP
    speculator: of the paths of full length that its `top` gives, those with the largest probability are verified, equal
    beginnings once.

    Children are the most likely tokens and never draws, as in `ConfidenceTree`.

    Attributes:
        candidates: number of paths, `n_candidates` of a published file.
        top: number of children of a node by its depth, `top_k_tokens_per_head` of a published file.

    Raises:
        ValueError: a number below 1, no level, or more paths than there are.
    """

    candidates: int
    top: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.top or min(self.top) < 1:
            raise ValueError(f"top: got {self.top}, takes one or more numbers of at least 1")
        if not 1 <= self.candidates <= math.prod(self.top):
            raise ValueError(f"candidates: got {self.candidates}, takes 1 to {math.prod(self.top)}, the number of "
                             f"paths of {self.top}")

    @property
    def length(self) -> int:
        return len(self.top)

    @property
    def least_nodes(self) -> int:
        return sum(min(self.candidates, width) for width in self._widths)

    @property
    def _widths(self) -> list[int]:
        """The numbers of nodes of the levels of the whole tree."""
        return [math.prod(self.top[:depth + 1]) for depth in range(self.length)]

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        widths = self._widths
        first = np.concatenate([[0], np.cumsum(widths)])        # index of the first node of each level
        room, total = int(first[-2]), int(first[-1])
        # by index: the index of the parent, -1 for the newest token
        above = np.concatenate([np.arange(w) // k + start for w, k, start in zip(
            widths, self.top, [-1, *first[:-2]], strict=True)])
        g, children = grower.ranked.start(state, room, self.top[0])
        tokens: list[Array] = []
        score, handed = jnp.zeros(()), jnp.zeros((grower.s.batch, 1, 1))
        for depth in range(self.length):
            if depth:
                slots = np.asarray(1 + above[first[depth - 1]:first[depth]], np.int32)[None]
                g, children = grower.ranked.expand(g, tokens[-1], jnp.asarray(slots), self.top[depth])
            # a first token that the draft forbids has no probability, and is drafted all the same
            step = jnp.where(children.live, jnp.maximum(children.log_p, -1e9), -jnp.inf)
            score = (handed + step).reshape(grower.s.batch, -1)
            tokens.append(children.tokens.reshape(score.shape))
            handed = score[..., None]
        best, leaf = jax.lax.top_k(score, self.candidates)
        kept = jnp.zeros((grower.s.batch, total), bool)
        for depth, start in enumerate(first[:-1]):
            index = start + leaf // (widths[-1] // widths[depth])
            kept = jax.vmap(lambda row, i, live: row.at[i].max(live))(kept, index, best > -jnp.inf)
        at = jnp.sort(jnp.where(kept, jnp.arange(total), total), 1)[:, :self.least_nodes]        # parents first
        live, index = at < total, jnp.minimum(at, total - 1)
        node = jnp.where(kept, jnp.cumsum(kept, 1), -1).astype(jnp.int32)
        up = take(jnp.pad(node, ((0, 0), (1, 0))), jnp.asarray(1 + above, jnp.int32)[index])
        return (Proposal(tokens=take(jnp.concatenate(tokens, 1), index), live=live, parents=jnp.where(live, up, 0)),
                g.source, node[:, :room])


@ALGORITHMS.register("mlp-speculator", "Accelerating Production LLMs with Combined Token/Embedding Speculators",
                     "Wertheimer et al. 2024", family="speculative-linear", needs="a trained drafter",
                     guarantee="seed-exact")
def mlp_speculator(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None,
                   candidates: Count = 1, top: tuple[Count, ...] | None = None) -> Speculative:
    """Drafts with a recurrent network without attention, from the target's last hidden state and the drafted tokens.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        shape: shape of the draft tree, in place of `candidates` and `top`; None: the paths, or a chain of as many
            tokens as the drafter predicts.
        verify: the rule that accepts drafts; None: seed-exact.
        candidates: number of paths that are verified, the most likely ones; 1 without `top`: a chain, each of whose
            tokens is the most likely one. `load_drafter` does not read this number, `n_candidates` in published files.
        top: number of tokens of each step of which these paths are made, `top_k_tokens_per_head` in published files;
            None: 5, 4, 3 and so on, as in the authors' code for three steps.

    Raises:
        ValueError: more numbers in `top` than steps, or `candidates` or `top` beside `shape`.
    """
    if shape is not None and (candidates, top) != (1, None):
        raise ValueError(f"candidates, top: got {candidates} and {top} beside shape={shape}; takes one or the other")
    source = trained(lm, draft, "mlp-speculator")
    longest = source.longest or 3
    if shape is None and (candidates > 1 or top is not None):
        if top is not None and len(top) > longest:
            raise ValueError(f"top: got {top}, takes at most {longest} numbers, one for each step of the drafter")
        shape = LikeliestPaths(candidates, tuple(top or (max(5 - i, 1) for i in range(longest))))
    return Speculative(source, verify or SeedExact(), shape or Chain(longest))
