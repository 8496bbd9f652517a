"""STAND's data-driven tree (Song et al. 2025): keeps the nodes of a large tree that were accepted most often.

The paper drafts a large tree on samples, counts how often each node is on the accepted path, and keeps the nodes with
the largest counts. Here the result is always a valid tree: a node needs its parent and, since children are tried in
order, its earlier siblings. Of all such trees with a given number of nodes, the one with the most acceptances is found
by a dynamic program over "first child, next sibling". `fit_tree` in `decodax.algorithms.speculative` does the counting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decodax.algorithms.speculative.fixed_trees import Fixed, Path


def from_acceptance(tree: Fixed, accepted: Sequence[float], nodes: int) -> Fixed:
    """Returns the subtree of `tree` with `nodes` nodes and the largest total number of acceptances.

    Args:
        tree: the large tree.
        accepted: acceptances of each node, as counts or rates, in the order of `tree.order`.
        nodes: number of nodes to keep.

    Raises:
        ValueError: `accepted` is not one number of at least 0 for each node, or `nodes` is not between 1 and the number
            of nodes.

    >>> large = Fixed.of([[0], [1], [0, 0], [0, 1], [1, 0]])
    >>> from_acceptance(large, [6, 3, 1, 1, 2], 3).order
    ((0,), (1,), (1, 0))
    """
    weight = np.asarray(accepted, float)
    if weight.shape != (len(tree.paths),) or not (weight >= 0).all():
        raise ValueError(f"accepted: got {weight.shape} numbers, takes {len(tree.paths)} of 0 or more, one a position")
    if not 1 <= nodes <= len(tree.paths):
        raise ValueError(f"nodes: got {nodes}, takes 1 to {len(tree.paths)}, the positions of the tree")
    of = dict(zip(tree.order, weight, strict=True))
    none = np.array([0.0] + [-np.inf] * nodes)
    # best[p][n]: the most acceptances of n positions among p, its later siblings and all below them; p is one if n > 0
    best: dict[Path, np.ndarray] = {}
    below: dict[Path, np.ndarray] = {}
    for p in sorted(tree.order, key=lambda p: (-len(p), [-i for i in p])):
        child, sibling = best.get((*p, 0), none), best.get((*p[:-1], p[-1] + 1), none)
        total = np.full(nodes + 1, -np.inf)
        total[0], below[p] = 0, np.zeros(nodes + 1, np.int32)
        for n in range(1, nodes + 1):
            split = child[:n] + sibling[n - 1::-1]
            below[p][n] = int(split.argmax())
            total[n] = of[p] + split.max()
        best[p] = total
    kept: list[Path] = []
    waiting: list[tuple[Path, int]] = [((0,), nodes)]
    while waiting:
        p, n = waiting.pop()
        if n:
            m = int(below[p][n])
            kept.append(p)
            waiting += [((*p[:-1], p[-1] + 1), n - 1 - m), ((*p, 0), m)]
    return Fixed(tuple(sorted(kept)))
