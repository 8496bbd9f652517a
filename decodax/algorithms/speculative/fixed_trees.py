"""Draft trees with a fixed topology: chains, k-ary trees, and lists of paths as in Medusa (Cai et al. 2024)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.source import Grower, Shape
from decodax.algorithms.speculative.tree import Proposal

Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Fixed(Shape):
    """A draft tree with a fixed list of nodes. A node is given by its path of ranks: `(0,)` is the most likely first
    token, `(0, 2)` the third most likely token after it.

    Args:
        paths: the nodes, in any order. All prefixes of a path must be in the list, and the ranks of siblings are 0, 1,
            ... without gaps.

    Raises:
        ValueError: a path without its prefix or an earlier sibling, a path twice, or no path.

    >>> Fixed.of([[0], [1], [0, 0]]).parents.tolist(), Fixed.balanced(2, 2).length
    ([0, 0, 1], 2)
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known = set(self.paths)
        if not known or len(known) != len(self.paths):
            raise ValueError(f"paths: got {len(self.paths)} paths, {len(known)} of them distinct; takes one or more, "
                             "each once")
        for path in self.paths:
            missing = [p for p in (path[:-1], (*path[:-1], path[-1] - 1)) if p and p[-1] >= 0 and p not in known]
            if not path or min(path) < 0 or missing:
                raise ValueError(f"paths: {path} needs {missing[0] if missing else 'ranks of 0 or more'}")

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> Fixed:
        """Returns the tree whose nodes are given by any sequences of ranks, such as lists: `[0, 2]` is the third most
        likely token after the most likely first one."""
        return cls(tuple(tuple(int(i) for i in p) for p in paths))

    @classmethod
    def balanced(cls, *branching: int) -> Fixed:
        """Makes the tree in which every node of level `i` has `branching[i]` children, as in SpecInfer and MCSD. With
        the verifier `MultiRound()` it is RSD-C (Jeon et al. 2024), whose Gumbel-top-k draws siblings without
        replacement.

        Raises:
            ValueError: no level, or one without children.
        """
        if not branching or min(branching) < 1:
            raise ValueError(f"branching: got {branching}, takes one or more numbers of at least 1")
        paths: list[Path] = []
        last: list[Path] = [()]
        for width in branching:
            last = [(*p, i) for p in last for i in range(width)]
            paths += last
        return cls(tuple(paths))

    @functools.cached_property
    def order(self) -> tuple[Path, ...]:
        """The paths of all drafts in the order in which they are in the target's window: by depth, then by ranks. The
        path at index `i` is window node `i + 1`."""
        return tuple(sorted(self.paths, key=lambda p: (len(p), p)))

    @property
    def parents(self) -> np.ndarray:
        """For each of the `N` drafts, in the order of `order`, the window index of its parent, `i32[N]`: 0 is the
        newest token, `i` is draft `i - 1`."""
        node: dict[Path, int] = {(): 0} | {p: i + 1 for i, p in enumerate(self.order)}
        return np.array([node[p[:-1]] for p in self.order], np.int32)

    @property
    def length(self) -> int:
        return max(map(len, self.paths))

    @property
    def least_nodes(self) -> int:
        return len(self.paths)

    @property
    def is_chain(self) -> bool:
        """True if no node has a sibling."""
        return len(self.paths) == self.length

    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Any]:
        plan = GrowthPlan(self)
        g, first = grower.start(state, plan.room, plan.fanout)
        found = plan.wide((first.tokens, first.live, first.log_q))

        def visit(carry: Any, level: tuple[Array, Array]) -> tuple[Any, None]:
            g, found = carry
            above, rank = level
            g, new = grower.expand(g, found[0][:, above, rank], above, plan.fanout)
            return (g, plan.put(found, (new.tokens, new.live, new.log_q), g.filled)), None

        if plan.levels:
            g, found = jax.lax.scan(visit, (g, found), (jnp.asarray(plan.above), jnp.asarray(plan.rank)))[0]
        return plan.proposal(*found), g.source, plan.nodes


class GrowthPlan:
    """The plan for growing a fixed tree: its nodes with children are expanded level by level. All levels are padded to
    one width so that they share a compiled loop body. An expanded node gets a slot.

    Attributes:
        fanout: largest number of children of a node.
        levels: number of levels of nodes with children, below the newest token.
        width: number of expanded nodes of each level, with padding.
        room: number of expanded nodes in total, which have slots 1 to `room`; the newest token has slot 0.
        above: `i32[levels, width]`, slot of each expanded node's parent.
        rank: `i32[levels, width]`, its rank among the children of that parent.
        real: `bool[levels, width]`, False for padding (a repeated node).
        nodes: `i32[1, room]`, window node of each expanded one, -1 for padding.
    """

    def __init__(self, tree: Fixed):
        self.order = tree.order
        node: dict[Path, int] = {(): 0} | {p: i + 1 for i, p in enumerate(self.order)}
        inner: list[list[Path]] = [[] for _ in range(tree.length - 1)]
        for p in self.order:
            if (*p, 0) in node:
                inner[len(p) - 1].append(p)
        self.levels, self.width = len(inner), max(map(len, inner), default=0)
        self.fanout = 1 + max(p[-1] for p in self.order)
        self.room = self.width * self.levels
        self.slot: dict[Path, int] = {(): 0}
        self.slot |= {p: 1 + d * self.width + j for d, level in enumerate(inner) for j, p in enumerate(level)}
        padded = [level + [level[0]] * (self.width - len(level)) for level in inner]
        self.above = np.array([[self.slot[p[:-1]] for p in level] for level in padded], np.int32)
        self.rank = np.array([[p[-1] for p in level] for level in padded], np.int32)
        self.real = np.array([[j < len(level) for j in range(self.width)] for level in inner], bool)
        self.parents = np.array([node[p[:-1]] for p in self.order], np.int32)
        self.nodes = np.full((1, self.room), -1, np.int32)
        self.nodes[0, [i - 1 for p, i in self.slot.items() if p]] = [node[p] for p in self.slot if p]

    def wide(self, root: Any) -> Any:
        """Returns the arrays of the newest token (a pytree with leaves `[B, 1, ...]`), padded with zeros for the `room`
        expanded nodes: leaves `[B, 1 + room, ...]`."""
        return jax.tree.map(lambda x: jnp.zeros((x.shape[0], 1 + self.room, *x.shape[2:]), x.dtype).at[:, :1].set(x),
                            root)

    def put(self, found: Any, new: Any, filled: Array) -> Any:
        """Returns `found`, the arrays of all slots (leaves `[B, 1 + room, ...]`), with those of the level expanded
        last, `new` (leaves `[B, width, ...]`), written at its slots. `filled` (`i32[]`) is the number of slots in use
        after that level."""
        start = filled - self.width
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 1), found, new)

    def proposal(self, tokens: Array, live: Array, log_q: Array | None) -> Proposal:
        """Returns the drafts of the tree as a `Proposal`.

        Args:
            tokens: `i32[B, 1 + room, fanout]`, the children of the newest token (slot 0) and of each expanded node.
            live: `bool[B, 1 + room, fanout]`, False for children that do not exist.
            log_q: `f32[B, 1 + room, V]`, log of the distributions from which they were drawn, or None.
        """
        up = np.array([self.slot[p[:-1]] for p in self.order], np.int32)
        ranks = np.array([p[-1] for p in self.order], np.int32)
        if log_q is not None:       # the nodes that have children are among those up to the last one that has
            source = np.array([self.slot.get(p, 0) for p in [(), *self.order][:self.parents.max() + 1]], np.int32)
            log_q = log_q if np.array_equal(source, np.arange(1 + self.room)) else log_q[:, source]
        chain = np.array_equal(self.parents, np.arange(len(self.parents)))
        return Proposal(tokens=tokens[:, up, ranks], live=live[:, up, ranks],
                        parents=None if chain else self.parents[None], log_q=log_q)


def Chain(length: int = 5) -> Fixed:
    """Returns the shape of a chain of `length` drafts.

    Raises:
        ValueError: `length` is below 1.
    """
    if length < 1:
        raise ValueError(f"length: got {length}, takes at least 1")
    return Fixed(tuple((0,) * (i + 1) for i in range(length)))
