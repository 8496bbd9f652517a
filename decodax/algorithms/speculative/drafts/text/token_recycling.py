"""Token Recycling: drafts a tree from a matrix of the latest likely successors of each token ("Turning Trash into
Treasure: Accelerating Inference of Large Language Models with Token Recycling", Luo et al., 2024).

Row `t` of the matrix has the `k` most likely tokens after `t` when the target last scored that token, in the prompt, in
the output or in a rejected draft. Drafts are a fixed imbalanced tree after the newest token: node `(2, 0)` is the most
likely successor of its third most likely successor. After each round all scored nodes overwrite their tokens' rows; of
several nodes with the same token the last in the window counts.

The matrix is first filled during prefill of the prompt, starting from that of an earlier generation (`warm`) or from an
empty one, whose rows make no drafts. The authors' code does not use the prefill; its single matrix, at first filled
with token 0, is kept from prompt to prompt.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.published import RECYCLING_80
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.pallas_kernels.vocabulary import by_nodes, top_k

RANKS = (0.52, 0.18, 0.09, 0.06, 0.05, 0.04, 0.03, 0.03)
"""Assumed probabilities that the target's token is the successor of each rank; they determine the trees of
`template`."""


def template(nodes: int, ranks: tuple[float, ...] = RANKS, depth: int = 6) -> Fixed:
    """Returns the tree of the `nodes` most likely paths, at most `depth` deep, if the successor of each rank is right
    with the probability in `ranks`. For sizes other than the published one, if no tree is fitted (`fit_tree`).

    >>> template(4, (0.6, 0.3)).order
    ((0,), (1,), (0, 0), (0, 0, 0))
    """
    if nodes < 1:
        raise ValueError(f"nodes: got {nodes}, takes at least 1")
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chance, (rank,)) for rank, chance in enumerate(ranks)]
    heapq.heapify(waiting)
    while waiting and len(paths) < nodes:
        chance, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < depth:
            for rank, more in enumerate(ranks):
                heapq.heappush(waiting, (chance * more, (*path, rank)))
    return Fixed(tuple(paths))


LANES = 128
"""Number of entries in a line of the array that stores the matrix, the width of a TPU's vector lanes."""


SMALL_TREE = template(15)
"""A tree for hardware on which a wide window is slow: a CPU, or a large batch."""


@dataclasses.dataclass(frozen=True)
class TokenRecycling(Draft):
    """Drafts a fixed tree from the tokens that the target found likely when it last scored each token (Luo et al.,
    2024).

    Attributes:
        tree: the tree; default the authors'.
        k: number of successors kept for each token; at least the number of ranks in the tree.
        rows: number of rows of the matrix. With at least the vocabulary size it is the paper's. With fewer, tokens with
            the same remainder modulo `rows` share a row, which has the successors of the latest of them.
        warm: the matrix of an earlier generation, `i32[(1 + k) * rows]`: the first entries of one row of its
            `state.algo[0]`, line by line.

    Raises:
        ValueError: `k` is smaller than the number of ranks in the tree, or `rows` is below 1.
    """

    tree: Fixed = RECYCLING_80
    k: int = 8
    rows: int = 32_768
    warm: Any = data()
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        ranks = 1 + max(max(path) for path in self.tree.paths)
        if self.k < ranks:
            raise ValueError(f"k: got {self.k}, takes at least {ranks}, the ranks in the tree")
        if self.rows < 1:
            raise ValueError(f"rows: got {self.rows}, takes at least 1")
        if self.warm is not None and self.warm.shape != (self.size,):
            raise ValueError(f"warm: got an array of shape {self.warm.shape}, takes {(self.size,)}")

    @property
    def size(self) -> int:
        """Number of entries of the flat array in which the matrix of candidate tokens is stored: `(1 + k) * rows`."""
        return (1 + self.k) * self.rows

    @property
    def form(self) -> Fixed:
        return self.tree

    @property
    def length(self) -> int:
        return self.tree.length

    @property
    def prefill_observer(self) -> TokenRecycling:
        return self

    def init(self, params: Params, s: State) -> Any:
        """Returns the matrix, stored in lines of 128 entries, `i32[B, n, 128]`: first the token of each row, -1 for
        none; then the most likely successor of each row, then the second of each, and so on.

        With lines of 128 a TPU writes single entries in place. Arrays of other shapes that were tried (`[B, rows, 1 +
        k]`, `[B, 1 + k, rows]`, successors alone, and `[B, (1 + k) * rows]` on v6e) were copied to another layout for
        the scatter on some mesh, with up to 128 MiB of padding in each call.
        """
        held = jnp.full(self.size, -1, jnp.int32) if params.draft is None else jnp.asarray(params.draft, jnp.int32)
        lines = jnp.pad(held, (0, -self.size % LANES)).reshape(-1, LANES)
        return jnp.broadcast_to(lines, (s.batch, *lines.shape)) + 0

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        order, parents = self.tree.order, self.tree.parents
        tokens = s.newest[:, None]
        for depth in range(1, self.length + 1):
            level = [i for i, path in enumerate(order) if len(path) == depth]
            above = tokens[:, parents[level]]
            ranks = jnp.asarray([1 + order[i][-1] for i in level], jnp.int32)
            row = above % self.rows
            held, child = _at(state, row), _at(state, ranks * self.rows + row)
            # an empty node is -1, and so is everything below it: no row is held by -1 with a successor
            tokens = jnp.concatenate([tokens, jnp.where((held == above) & (above >= 0), child, -1)], 1)
        drafts = tokens[:, 1:]
        return Proposal(tokens=jnp.maximum(drafts, 0), live=drafts >= 0, parents=parents[None]), state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        likely = by_nodes(lambda x, _: top_k(x, self.k)[1], out.head, out.hidden).astype(jnp.int32)
        slot = jnp.where(window.live, window.tokens % self.rows, self.rows)      # beyond the end: dropped
        later = jnp.triu(slot[:, :, None] == slot[:, None, :], 1).any(-1)
        slot = jnp.where(later, self.rows, slot)                                 # a scatter's order is not defined
        new = jnp.concatenate([window.tokens[..., None], likely], -1)
        places = jnp.where(slot[..., None] < self.rows, slot[..., None] + self.rows * jnp.arange(1 + self.k),
                           state[0].size)
        put = lambda matrix, at, x: matrix.at[at.ravel() // LANES, at.ravel() % LANES].set(x.ravel(), mode="drop")
        return jax.vmap(put)(state, places, new)


def _at(matrix: Array, entry: Array) -> Array:
    """Returns the entries with indices `i32[B, W]` of the matrix `i32[B, n, 128]`."""
    return jax.vmap(lambda matrix, entry: matrix[entry // LANES, entry % LANES])(matrix, entry)


@ALGORITHMS.register("token-recycling", "Turning Trash into Treasure: Accelerating Inference of Large Language Models "
                     "with Token Recycling", "Luo et al. 2024", family="speculative-tree", guarantee="seed-exact")
def token_recycling(k: Count = 8, nodes: Count | None = None, tree: Fixed | None = None, warm: Any = None,
                    verify: Verifier = SeedExact()) -> Speculative:
    """Drafts a tree of the tokens that the target last found likely after each token.

    It needs neither a draft model nor repetition in the text. `nodes=15` is for a CPU or a large batch, with which a
    wide window is slow.

    Args:
        k: number of successors kept for each token.
        nodes: number of nodes of the draft tree; None: the authors' 80 nodes.
        tree: the draft tree itself, in place of `nodes`.
        warm: the matrix of an earlier generation: `i32[rows, 1 + k]`, each row a token and its successors, or flat as
            in `TokenRecycling`.
        verify: the rule that accepts drafts.
    """
    if tree is not None and nodes is not None:
        raise ValueError(f"nodes: got {nodes} beside a tree, takes one of the two")
    tree = tree or (RECYCLING_80 if nodes is None else template(nodes))
    if warm is None:
        return Speculative(TokenRecycling(tree, k=k), verify)
    table = np.asarray(warm, np.int32)
    if table.ndim == 2:
        table = table.T.reshape(-1)
    return Speculative(TokenRecycling(tree, k, len(table) // (1 + k), table), verify)
