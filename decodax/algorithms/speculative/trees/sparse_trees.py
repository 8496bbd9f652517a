"""The dynamic sparse trees of parallel prompt decoding ("Hardware-Aware Parallel Prompt Decoding for Memory-Efficient
Acceleration of LLM Inference", Chen et al., 2024).

A window has the newest token, drafts, and prompt tokens after each of them. As many prompt tokens as the last accepted
node had, as deep may the next tree be: that is the state of a row, and each state has a tree of its own. Prompt tokens
after nodes at which a round seldom ends are left out, and drafts take their place. `sparse_trees` finds the split that
gives the most tokens, by measured acceptance (`decodax.train.drafting.sparse_trees` measures it).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.fixed_trees import Fixed, Path
from decodax.algorithms.speculative.source import Grower, Shape, Source
from decodax.algorithms.speculative.tree import Proposal
from decodax.common.struct import Struct, struct
from decodax.core.window import take


@struct
class DepthState(Struct):
    """State of a source that predicts a different number of tokens ahead in each row.

    Attributes:
        known: `i32[B]`, the largest depth to which the source can draft in this round, at least 1.
    """

    known: Array


@dataclasses.dataclass(frozen=True)
class SparseTree:
    """The tree of one state.

    Attributes:
        paths: the drafts, as in `Fixed`.
        prompts: number of prompt tokens after the newest token, and after each draft in the order of `Fixed.order`.

    Raises:
        ValueError: as in `Fixed`, or not one number of at least 1 for each node.
    """

    paths: tuple[Path, ...]
    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.prompts) != 1 + len(Fixed(self.paths).paths) or min(self.prompts) < 1:
            raise ValueError(f"prompts: got {self.prompts} for {len(self.paths)} drafts; takes a number of at least 1 "
                             "for the newest token and for each draft")


@dataclasses.dataclass(frozen=True)
class SparseTrees(Shape):
    """A tree for each state of a row, for `ppd`.

    Attributes:
        trees: those of the states 1, 2, ..., K: a row whose last node had `k` prompt tokens drafts the `k`-th tree,
            which is at most `k` deep.

    Raises:
        ValueError: no tree, one that is deeper than its state, or a node with more prompt tokens than there are states.
    """

    trees: tuple[SparseTree, ...]

    def __post_init__(self) -> None:
        for k, t in enumerate(self.trees, 1):
            if Fixed(t.paths).length > k or max(t.prompts) > len(self.trees):
                raise ValueError(f"trees: the tree of state {k} is {Fixed(t.paths).length} deep and has up to "
                                 f"{max(t.prompts)} prompt tokens after a node; takes a depth of at most {k}, and at "
                                 f"most {len(self.trees)} prompt tokens")
        if not self.trees:
            raise ValueError("trees: got none, takes one for each number of prompt tokens")

    @functools.cached_property
    def union(self) -> Fixed:
        """The fixed tree that has every draft of every state's tree."""
        return Fixed(tuple(sorted({path for t in self.trees for path in t.paths})))

    @property
    def length(self) -> int:
        return self.union.length

    @property
    def nodes(self) -> int:
        """Largest number of drafts `N` of a state's tree."""
        return max(len(t.paths) for t in self.trees)

    def table(self, of: Any, fill: int) -> np.ndarray:
        """Tabulates a property of drafts by state. `of` maps the drafts of a tree, in window order, to a list of
        numbers. Returns one row for each of the `K` states' trees, `i32[K, N]`, padded with `fill`."""
        found = np.full((len(self.trees), self.nodes), fill, np.int32)
        for row, t in zip(found, self.trees, strict=True):
            row[:len(t.paths)] = of(Fixed(t.paths).order)
        return found

    def check_source(self, source: Source) -> None:
        if not source.knows_depth:
            raise ValueError("shape: SparseTrees takes the prompt tokens of 'ppd', got a "
                             f"{type(source).__name__}")

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Any]:
        assert isinstance(state, DepthState)
        row = state.known - 1
        p, source, nodes = self.union.grow(grower, state)
        of = {path: i for i, path in enumerate(self.union.order)}
        pick = jnp.asarray(self.table(lambda order: [of[path] for path in order], -1))[row]
        up = jnp.asarray(self.table(lambda order: [1 + order.index(path[:-1]) if path[1:] else 0 for path in order], 0))
        some = lambda x, fill: jnp.where(pick >= 0, take(x, jnp.maximum(pick, 0)), fill)
        log_q = p.log_q
        if log_q is not None:           # nodes after the last one with children have none in any state
            at = jnp.concatenate([jnp.zeros_like(pick[:, :1]), pick + 1], 1)
            log_q = take(log_q, jnp.minimum(at, log_q.shape[1] - 1))
        return Proposal(tokens=some(p.tokens, -1), live=some(p.live, False), parents=up[row], log_q=log_q), source, (
            np.full_like(nodes, -1))


def expected_tokens(trees: SparseTrees, accuracy: np.ndarray) -> float:
    """Returns the expected tokens of a round in the long run: over the states that follow one another, 1 and the
    accepted drafts.

    Args:
        trees: the trees.
        accuracy: `f64[K, R]`, probability that the token at each depth is the guess of each rank, if the path to it is
            right. Depths are independent, as in the paper.
    """
    K = len(trees.trees)
    follows, gains = np.zeros((K, K)), np.zeros(K)
    for k, t in enumerate(trees.trees):
        order = Fixed(t.paths).order
        reach = {(): 1.0} | {path: _chance(path, accuracy) for path in order}
        gains[k] = sum(reach.values())
        for path, prompts in zip([(), *order], t.prompts, strict=True):
            after = sum(x for child, x in reach.items() if child and child[:-1] == path)
            follows[k, prompts - 1] += reach[path] - after
    share, *_ = np.linalg.lstsq(np.vstack([follows.T - np.eye(K), np.ones(K)]), np.append(np.zeros(K), 1.0), rcond=None)
    return float(share @ gains)


def sparse_trees(accuracy: Any, size: int, ensemble: int = 1) -> SparseTrees:
    """Returns the trees with the most expected tokens for windows of at most `size` nodes.

    As in the authors' code the drafts of a state are the most likely ones that are not too deep; each node begins with
    all prompt tokens, and they are taken away one by one where that costs least. The numbers of drafts are searched one
    after the other until none changes.

    Args:
        accuracy: `f64[K, R]`, see `expected_tokens`, for K prompt tokens.
        size: number of nodes: the newest token, drafts and prompt tokens.
        ensemble: number of embeddings of a prompt token.

    Raises:
        ValueError: an accuracy that is no table of probabilities, or too few nodes for a draft.

    >>> found = sparse_trees([[0.6, 0.2], [0.4, 0.1]], 8)
    >>> [(len(t.paths), t.prompts) for t in found.trees]
    [(2, (1, 2, 2)), (3, (1, 1, 1, 1))]
    """
    table = np.asarray(accuracy, np.float64)
    if table.ndim != 2 or not table.size or table.min() < 0 or (table.sum(1) > 1 + 1e-6).any():
        raise ValueError(f"accuracy: got an array of shape {table.shape}, takes rows of probabilities by depth and "
                         "rank")
    K, most = len(table), (size - 1 - ensemble) // (1 + ensemble)
    if most < 1:
        raise ValueError(f"size: got {size}, takes at least {2 + 2 * ensemble}: the newest token, a draft, and "
                         "a prompt token after each")
    ranked = [_likeliest(table[:k], most) for k in range(1, K + 1)]

    def made(counts: Sequence[int]) -> SparseTrees:
        values = [sum(_chance(path, table) for path in paths[:n]) for paths, n in zip(ranked, counts, strict=True)]
        return SparseTrees(tuple(_thinned(paths[:n], table, values, (size - 1 - n) // ensemble)
                                 for paths, n in zip(ranked, counts, strict=True)))

    counts = [min(len(paths), max(1, most // 2)) for paths in ranked]
    best, trees = 0.0, made(counts)
    while (value := expected_tokens(trees, table)) > best + 1e-9:
        best = value
        for k, paths in enumerate(ranked):
            tried = [[*counts[:k], n, *counts[k + 1:]] for n in range(1, len(paths) + 1)]
            counts = max(tried, key=lambda c: expected_tokens(made(c), table))
        trees = made(counts)
    return trees


def _chance(path: Path, accuracy: np.ndarray) -> float:
    return float(np.prod([accuracy[d, rank] for d, rank in enumerate(path)]))


def _likeliest(accuracy: np.ndarray, count: int) -> list[Path]:
    """Returns the `count` most likely paths, without gaps, in the order in which they are added to a tree."""
    found: list[Path] = []
    ready: list[Path] = [(0,)]
    while ready and len(found) < count:
        path = max(ready, key=lambda path: (_chance(path, accuracy), -len(path)))
        ready.remove(path)
        found.append(path)
        if path[-1] + 1 < accuracy.shape[1]:
            ready.append((*path[:-1], path[-1] + 1))
        if len(path) < len(accuracy):
            ready.append((*path, 0))
    return found


def _thinned(paths: list[Path], accuracy: np.ndarray, values: Sequence[float], budget: int) -> SparseTree:
    """Returns a tree with at most `budget` prompt tokens in all; `values` are the accepted drafts in each state."""
    order = Fixed(tuple(paths)).order
    reach = [1.0, *(_chance(path, accuracy) for path in order)]
    ends = [x - sum(_chance(child, accuracy) for child in order if child[:-1] == path)
            for path, x in zip([(), *order], reach, strict=True)]
    prompts = [len(values)] * len(ends)
    while sum(prompts) > budget:
        costs = [end * (values[n - 1] - values[n - 2]) if n > 1 else np.inf
                 for end, n in zip(ends, prompts, strict=True)]
        prompts[int(np.argmin(costs))] -= 1
    return SparseTree(tuple(paths), tuple(prompts))
