"""Sequoia: the best draft tree for given probabilities of acceptance ("Sequoia: Scalable, Robust, and Hardware-aware
Speculative Decoding", Chen, May, Svirschevski, Huang, Ryabinin, Jia, Chen, 2024).

If the k-th child of any node is accepted with probability p_k, the expected number of accepted drafts of a tree is the
sum over its nodes of the product of p down to them. A dynamic program over (size, depth, children) finds the best tree
of a given size. `sequoia_for` also chooses size and depth, by given times. `decodax.train.fit_sequoia` measures
probabilities and times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.algorithms.speculative.adaptive.fit_acceptance import fit_acceptance
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Fixed, Path
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS

TYPICAL = (0.6, 0.15, 0.07, 0.04)
"""Typical probabilities that the k-th child is accepted, for models that were not measured."""


def expected(acceptance: Sequence[float], tree: Fixed) -> float:
    """Returns the expected number of tokens in a round with `tree`, including the target's own token. `acceptance[k]`
    is the probability that the k-th child of a node is accepted.

    >>> expected([0.5, 0.25], Fixed.of([[0], [1], [0, 0]]))
    2.0
    """
    return 1 + float(sum(np.prod([acceptance[i] for i in path]) for path in tree.paths))


def sequoia_tree(acceptance: Sequence[float], nodes: int, length: int | None = None) -> Fixed:
    """Returns the tree of `nodes` drafts with the largest expected number of tokens in a round.

    Args:
        acceptance: the probability that the k-th child is accepted, for each k; a node has at most this number of
            children.
        nodes: number of drafts.
        length: largest number of drafts on a path; None: no limit.

    Raises:
        ValueError: numbers below 1, probabilities outside [0, 1], or too few of them for a tree of `nodes` drafts.

    >>> sequoia_tree([0.5, 0.1], 3).paths
    ((0,), (0, 0), (0, 0, 0))
    """
    at_least(nodes=nodes, length=nodes if length is None else length)
    return _Table(acceptance, nodes, min(nodes, length or nodes)).tree(nodes, min(nodes, length or nodes))


def sequoia_for(acceptance: Sequence[float], verify: Mapping[int, float], draft: float, length: int = 16) -> Fixed:
    """Returns the tree with the largest expected number of tokens per second; its size and depth are chosen by given
    times.

    Args:
        acceptance: the probability that the k-th child is accepted, for each k.
        verify: numbers of drafts to consider, with the seconds of a round with each, without drafting.
        draft: seconds of one draft step; a tree takes one step for each layer.
        length: largest number of layers.

    Raises:
        ValueError: the errors of `sequoia_tree`, no size, or a time that is not positive (`draft` may be 0).

    >>> tree = sequoia_for([0.8, 0.1], {2: 1.0, 4: 1.1, 8: 4.0}, draft=0.1)
    >>> len(tree.paths), tree.length
    (4, 4)
    """
    if not verify or min(verify.values()) <= 0 or draft < 0:
        raise ValueError(f"verify, draft: got {dict(verify)}, {draft}, takes positive times for one size or more")
    at_least(length=length, nodes=min(verify))
    table = _Table(acceptance, max(verify), min(max(verify), length))
    rate = {(n, d): float(table.best[d, n]) / (verify[n] + d * draft)
            for n in sorted(verify) for d in range(1, min(n, length) + 1) if np.isfinite(table.best[d, n])}
    if not rate:
        raise ValueError(f"acceptance: got {len(acceptance)} probabilities, too few for a tree of {min(verify)} "
                         f"drafts, {length} deep")
    return table.tree(*max(rate, key=rate.__getitem__))


@ALGORITHMS.register("sequoia", "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
                     "Chen et al. 2024", family="speculative-tree", needs="a draft model",
                     guarantee="distribution-exact")
def sequoia(draft: Any, acceptance: tuple[Share, ...] | None = None, nodes: Count = 24, length: Count | None = 8,
            shape: Fixed | None = None, samples: Any = None, lm: Any = None) -> Speculative:
    """Drafts the tree with the largest expected number of tokens for given probabilities of acceptance, found by
    dynamic programming.

    The default probabilities are a typical example. With `samples` those of your models are measured, by greedy
    decoding. `dx.train.fit_sequoia` measures them for your sampling options, and the times of your machine, and returns
    the tree for `shape`.

    Args:
        draft: the draft model.
        acceptance: probability that the k-th child of a node is accepted, for each k; a node has at most this number of
            children. None: those measured with `samples`, or else 0.6, 0.15, 0.07 and 0.04.
        nodes: number of drafts.
        length: largest number of drafts on a path; None: no limit.
        shape: the tree, in place of the one that follows from the other options; None: that one.
        samples: prompts as token ids, on which to measure the probabilities.
        lm: the target, which only `samples` need.

    Raises:
        ValueError: `samples` beside `acceptance` or `shape`, or without a target.
    """
    if samples is not None:
        if (acceptance, shape) != (None, None):
            raise ValueError(f"samples: got some beside acceptance={acceptance} and shape={shape}; takes one of the "
                             "three")
        if lm is None:
            raise ValueError("samples: got some without the model that they are measured with; give lm=")
        acceptance = fit_acceptance(lm, DraftModel(draft), samples)
    tree = shape or sequoia_tree(TYPICAL if acceptance is None else acceptance, nodes, length)
    return Speculative(DraftModel(draft), MultiRound(), tree)


class _Table:
    """The dynamic program. `best[d, n]` is the expected number of tokens of the best tree with `n` drafts below a node
    and depth at most `d`, including the node itself."""

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int):
        p = np.asarray(acceptance, float)
        if not p.size or p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
            raise ValueError(f"acceptance: got {list(acceptance)}, takes one or more probabilities")
        self.acceptance, self.widest = p, min(len(p), nodes)
        self.best = np.full((depth + 1, nodes + 1), -np.inf)
        self.best[:, 0] = 1
        # of[d, k, n]: with exactly k children; size[d, k, n]: how many drafts the k-th child's own subtree has
        self.of = np.full((depth + 1, self.widest + 1, nodes + 1), -np.inf)
        self.of[:, 0, 0] = 1
        self.size = np.zeros((depth + 1, self.widest + 1, nodes + 1), np.int32)
        n, m = np.ogrid[:nodes + 1, :nodes + 1]
        for d in range(1, depth + 1):
            for k in range(1, self.widest + 1):
                # the k-th child takes itself and m drafts, the children before it the rest
                rest = np.where(n - 1 - m >= 0, self.of[d, k - 1][np.maximum(n - 1 - m, 0)], -np.inf)
                gain = rest + p[k - 1] * np.where(np.isfinite(self.best[d - 1]), self.best[d - 1], 0)[None]
                gain = np.where(np.isfinite(self.best[d - 1])[None], gain, -np.inf)
                self.size[d, k] = gain.argmax(1)
                self.of[d, k] = gain.max(1)
            self.best[d] = self.of[d].max(0)

    def tree(self, nodes: int, depth: int) -> Fixed:
        if not np.isfinite(self.best[depth, nodes]):
            raise ValueError(f"acceptance: got {len(self.acceptance)} probabilities, too few for a tree of {nodes} "
                             f"drafts, {depth} deep")
        paths: list[Path] = []

        def place(above: Path, d: int, n: int) -> None:
            for k in range(int(self.of[d, :, n].argmax()), 0, -1):
                m = int(self.size[d, k, n])
                paths.append((*above, k - 1))
                place((*above, k - 1), d - 1, m)
                n -= 1 + m

        place((), depth, nodes)
        return Fixed(tuple(sorted(paths)))
