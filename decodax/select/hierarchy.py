"""Decisions that maximize the expected value of a metric, over explicit candidates or over a tree of classes.

This is minimum Bayes risk with known probabilities: the metric of each candidate for each possible truth, averaged with
the probabilities of the truths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.front.score import score
from decodax.io.load import LM
from decodax.select.consensus import apart


def best_expected(metric: Any, chances: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the candidate with the largest expected metric.

    Args:
        metric: `f64[n, m]`, the metric of each of `n` candidates if truth `j` of `m` holds.
        chances: `f64[..., m]`, the probabilities of the truths.

    Returns:
        `i64[...]`, the index of the best candidate, the first one of equals; `f64[..., n]`, the expected metric of
        each.

    Raises:
        ValueError: the shapes do not fit each other.

    >>> best_expected([[1, 0, 0], [0, 1, 0], [.6, .6, 0]], [.4, .3, .3])[0].item()
    2
    """
    metric, chances = np.asarray(metric, np.float64), np.asarray(chances, np.float64)
    if metric.ndim != 2 or chances.shape[-1:] != metric.shape[1:]:
        raise ValueError(f"metric and chances: got shapes {metric.shape} and {chances.shape}, take (n, m) and (..., m)")
    expected = chances @ metric.T
    return expected.argmax(-1), expected


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A tree of classes; the true class of a text is a leaf (Plaud et al., 2025).

    Attributes:
        parents: the parent of each node; -1 for the root, which is node 0. Parents come before their children.
        names: the names of the nodes, for `classify`.
    """

    parents: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"parents: got {self.parents[:1]} first, takes -1, the root")
        if bad := [i for i, p in enumerate(self.parents) if i and not 0 <= p < i]:
            raise ValueError(f"parents: got {self.parents[bad[0]]} for node {bad[0]}, takes a node before it")
        if self.names is not None and len(self.names) != len(self.parents):
            raise ValueError(f"names: got {len(self.names)} for {len(self.parents)} nodes")

    @property
    def leaves(self) -> np.ndarray:
        """`i64[m]`, the nodes without children."""
        return np.setdiff1d(np.arange(len(self.parents)), np.array(self.parents))

    @property
    def above(self) -> np.ndarray:
        """`bool[n, n]`: entry `[i, j]` is True if node `j` is `i` or an ancestor of `i`. Column 0 is False: the root is
        an ancestor of all nodes and does not count in the metrics."""
        out = np.eye(len(self.parents), dtype=bool)
        for i, p in enumerate(self.parents):
            if p >= 0:
                out[i] |= out[p]
        out[:, 0] = False
        return out

    def f_beta(self, beta: float = 1.0) -> np.ndarray:
        """Returns `f64[n, m]`, the hierarchical F-beta score of predicting each node if each leaf is true.

        Precision and recall are those of the set of a node and its ancestors.
        """
        return self.f_beta_of(self.above, beta)

    def f_beta_of(self, sets: Any, beta: float = 1.0) -> np.ndarray:
        """Returns `f64[k, m]`, the hierarchical F-beta score of predicting sets of nodes, `bool[k, n]`; the root does
        not count."""
        if beta < 0:
            raise ValueError(f"beta: got {beta}, takes a number from 0 on")
        sets = np.array(sets, bool)
        sets[:, 0] = False
        true = self.above[self.leaves]
        both = (sets[:, None] & true).sum(-1)
        size = beta ** 2 * true.sum(-1) + sets.sum(-1, keepdims=True)
        return np.where(size > 0, (1 + beta ** 2) * both / np.where(size > 0, size, 1), 0.0)

    def accuracy(self) -> np.ndarray:
        """Returns `f64[n, m]`, 1 where a node is the true leaf, else 0."""
        return (np.arange(len(self.parents))[:, None] == self.leaves).astype(np.float64)

    def best_node(self, chances: Any, beta: float = 1.0) -> np.ndarray:
        """Returns the index of the node with the largest expected F-beta score, `i64[...]`; see `f_beta`.

        Args:
            chances: `f64[..., m]`, the probability of each of the `m` leaves.
            beta: weight of recall against precision.
        """
        return best_expected(self.f_beta(beta), chances)[0]

    def best_set(self, chances: Any, beta: float = 1.0) -> np.ndarray:
        """Returns the set of nodes with the largest expected F-beta score, `bool[..., n]`, for leaf probabilities
        `f64[..., m]`.

        The set contains the ancestors of its nodes. For a set of `k` nodes the expected score is a sum over the nodes,
        so that the best set of each size is known. The best of these is found in `O(n^2)` instead of `2^n`.
        """
        chances = np.asarray(chances, np.float64)
        true, n = self.above[self.leaves], len(self.parents)
        depth = true.sum(-1)
        best, out = np.full(chances.shape[:-1], -1.0), np.zeros((*chances.shape[:-1], n), bool)
        for k in range(1, n):
            # what a node adds to a set of k nodes; never more than its parent adds
            worth = chances / (beta ** 2 * depth + k) @ true * (1 + beta ** 2)
            worth[..., 0] = -1.0
            order = np.argsort(-worth, axis=-1, kind="stable")[..., :k]
            value = np.take_along_axis(worth, order, -1).sum(-1)
            chosen = np.zeros_like(out)
            np.put_along_axis(chosen, order, True, -1)
            better = value > best + 1e-12
            best, out = np.where(better, value, best), np.where(better[..., None], chosen, out)
        return out


@FUNCTIONS.register("select.classify", "To Each Metric Its Decoding: Post-Hoc Optimal Decision Rules of Probabilistic "
                    "Hierarchical Classifiers", "Plaud et al. 2025", "the class that makes hierarchical F-beta largest")
def classify(lm: LM, prompts: Sequence[str], tree: Hierarchy, *, beta: float = 1.0,
             ask: Callable[[str], str] = str) -> tuple[list[str], np.ndarray]:
    """Predicts the class of each text in a tree of classes: the node with the largest expected hierarchical F-beta
    score.

    Args:
        lm: a result of `load`. The probability of a leaf is that of its name after the prompt, excluding longer names
            that begin with it.
        prompts: the texts.
        tree: the classes, with names.
        beta: weight of recall against precision.
        ask: makes a prompt from a text.

    Returns:
        The name of the predicted node of each text, which need not be a leaf, and the leaf probabilities `f64[B, m]`.

    Raises:
        ValueError: a tree without names.
    """
    if tree.names is None:
        raise ValueError("tree: has no names, and a model is asked for names")
    leaves = [tree.names[i] for i in tree.leaves]
    found, n = score(lm, [(ask(text), name) for text in prompts for name in leaves]), len(leaves)
    sums = np.stack([apart(found.sum[i:i + n], found.tokens[i:i + n]) for i in range(0, len(found), n)])
    chances = np.exp(sums - sums.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    return [tree.names[i] for i in tree.best_node(chances, beta)], chances
