"""Token Recycling: drafts a tree from a matrix of each token's latest likely successors ("Turning Trash into Treasure:
Accelerating Inference of Large Language Models with Token Recycling", Luo et al., 2024).

Row `t` of the matrix holds the `k` likeliest tokens that the target saw after `t` when it last scored that token, in
the prompt, in the output or on a draft that was rejected. Drafts are a fixed imbalanced tree under the newest token:
node `(2, 0)` is the likeliest successor of its third likeliest successor. After each round all scored nodes overwrite
their tokens' rows; of several nodes with one token the last in the window counts.

The matrix begins with the prompt's own prefill, on top of one that an earlier generation left (`warm`) or of nothing,
where no draft is made. The authors' code does not read the prefill; its one matrix, at first full of token 0, goes on
from prompt to prompt.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
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
"""Assumed chances that the target's token is the successor of each rank; they shape trees of other sizes."""


def template(nodes: int, ranks: tuple[float, ...] = RANKS, depth: int = 6) -> Fixed:
    """Returns the tree of the `nodes` paths that are likeliest if each rank holds with its own chance: for sizes other
    than the published one, where nothing is fitted (`fit_tree`).

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
"""Entries of a line of the array that holds the matrix, the width of a TPU's vector lanes."""


SMALL_TREE = template(15)
"""For hardware on which a wide window costs: a CPU, or a large batch."""


@dataclasses.dataclass(frozen=True)
class TokenRecycling(Draft):
    """Drafts a fixed tree from the tokens that the target found likely when it last scored each token.

    Attributes:
        tree: the template; default the authors'.
        k: successors kept for each token; at least as many as the template has ranks.
        rows: rows of the matrix. With at least the vocabulary's size it is the paper's; with fewer, tokens of one
            remainder share a row, in which the latest stays.
        warm: the matrix of an earlier generation, `i32[(1 + k) * rows]`: the first entries of one row of its
            `state.algo[0]`, line by line.

    Raises:
        ValueError: `k` smaller than the template's ranks, or less than one row.
    """

    tree: Fixed = RECYCLING_80
    k: int = 8
    rows: int = 32_768
    warm: Any = data()

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
        """Numbers of the matrix."""
        return (1 + self.k) * self.rows

    @property
    def form(self) -> Fixed:
        return self.tree

    @property
    def length(self) -> int:
        return self.tree.length

    @property
    def reader(self) -> TokenRecycling:
        return self

    def init(self, params: Params, s: State) -> Any:
        """Returns the matrix, `i32[B, n, 128]`, line by line: first the token whose successors each row holds, -1 for
        none; then the likeliest successor of each row, then the second of each, and so on.

        With lines of 128 a TPU writes single entries in place. Other shapes that were tried (`[B, rows, 1 + k]`,
        `[B, 1 + k, rows]`, successors by themselves, and `[B, (1 + k) * rows]` on v6e) were laid out anew for the
        scatter, on some mesh, with up to 128 MiB of padding around each call.
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

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
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
    """Returns entries `i32[B, W]` of the matrix `i32[B, n, 128]`."""
    return jax.vmap(lambda matrix, entry: matrix[entry // LANES, entry % LANES])(matrix, entry)


@ALGORITHMS.register("token-recycling", "Turning Trash into Treasure: Accelerating Inference of Large Language Models "
                     "with Token Recycling", "Luo et al. 2024", family="speculative-tree", guarantee="seed-exact")
def token_recycling(k: Count = 8, nodes: Count | None = None, tree: Fixed | None = None, warm: Any = None,
                    verify: Verifier = SeedExact()) -> Speculative:
    """Drafts a tree of the tokens that the target last found likely after each token.

    It needs no draft model and no repetition in the text. `nodes=15` suits a CPU or a large batch, where a wide window
    costs.

    Args:
        k: successors kept for each token.
        nodes: size of the draft tree; None: the authors' 80 nodes.
        tree: the draft tree itself, in place of `nodes`.
        warm: the matrix of an earlier generation: `i32[rows, 1 + k]`, each row a token and its successors, or flat as
            in `TokenRecycling`.
        verify: rule that accepts drafts.
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
