"""A tree of canvases: search and sampling by reward along the denoising of a masked diffusion model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.common.registry import SEARCHES
from decodax.core.state import Status
from decodax.search.canvases import Canvases
from decodax.search.explorer import CanvasExplorer, Ranked, Score, log_mean, normal


@dataclasses.dataclass
class CanvasTree:
    """The canvases of one prompt, by number; 0 is the initial one. A child is made of its parent by denoising.

    Attributes:
        parent: the parent of each canvas, -1 for the first.
        children: the children of each.
        value: soft value `v`.
        visits: number of simulations that passed through.
        ended: True if nothing is left to denoise.
        step: number of denoising steps before it.
    """

    parent: list[int] = dataclasses.field(default_factory=lambda: [-1])
    children: list[list[int]] = dataclasses.field(default_factory=lambda: [[]])
    value: list[float] = dataclasses.field(default_factory=lambda: [0.0])
    visits: list[int] = dataclasses.field(default_factory=lambda: [0])
    ended: list[bool] = dataclasses.field(default_factory=lambda: [False])
    step: list[int] = dataclasses.field(default_factory=lambda: [0])

    def add(self, parent: int, step: int, ended: bool) -> int:
        """Adds a canvas, which is not among its parent's children yet, and returns its number."""
        self.parent.append(parent)
        self.children.append([])
        self.value.append(-math.inf)
        self.visits.append(0)
        self.ended.append(ended)
        self.step.append(step)
        return len(self.parent) - 1

    def back_up(self, node: int, lam: float) -> None:
        """Updates soft values from a canvas to the root: `v(x) = log(mean over children of exp(lam v)) / lam`."""
        while (node := self.parent[node]) >= 0:
            self.value[node] = float(log_mean(lam * np.array([self.value[c] for c in self.children[node]]))) / lam

    def walk(self, lam: float, rng: np.random.Generator) -> int:
        """Draws a finished canvas, child by child in proportion to `exp(lam v)`."""
        node = 0
        while not self.ended[node]:
            node = self.draw(node, lam, rng)
        return node

    def draw(self, node: int, lam: float, rng: np.random.Generator) -> int:
        """Draws a child in proportion to `exp(lam v)`."""
        children = self.children[node]
        return children[int(rng.choice(len(children), p=normal(lam * np.array([self.value[c] for c in children]))))]


@SEARCHES.register("dts", "Diffusion Tree Sampling: Scalable inference-time alignment of diffusion models",
                   "Jain et al. 2025",
                   "a tree of canvases, whose leaves are samples of the model times the exponential of a reward",
                   model="pycode-diffusion")
@dataclasses.dataclass(frozen=True)
class DTS(CanvasExplorer):
    """Diffusion tree sampling (Jain et al., 2025, DTS).

    Canvases that were denoised from one another form a tree, whose leaves become samples of `p(x) exp(lam reward(x))`
    as it grows.

    A simulation descends from the root to children drawn in proportion to `exp(lam v)`, until it reaches a canvas with
    fewer children than its limit, `children * visits ** widening`. A new child is denoised from it, and from there the
    text is denoised to its end; all canvases on the way join the tree. The reward of the text is the soft value of its
    leaf, and `v(x) = log(mean over children of exp(lam v)) / lam` is updated up to the root. A simulation that ends at
    a leaf costs nothing. In the end texts are drawn by walks down the tree.

    Any masked diffusion sampler can be used (`algorithm=`); its distribution is `p`. `n` simulations run side by side;
    they share the tree as it was before, except for visits and for children that are being made, which count towards
    the limit. `log_evidence` is `lam v` of the root, an estimate of `log E exp(lam reward)`.

    Attributes:
        reward: scores whole texts; -inf excludes one.
        lam: weight of the reward.
        n: number of simulations at once, and of texts that are drawn.
        simulations: number of simulations of each prompt.
        children, widening: parameters of the limit; `widening=0` makes it constant.
        every: number of denoising steps between two canvases of the tree; larger values keep fewer canvases, with the
            same distribution.
    """

    reward: Score
    lam: float = 1.0
    n: int = 8
    simulations: int = 64
    children: float = 1.0
    widening: float = 0.8
    every: int = 1

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("simulations", 1), ("every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes at least {least}")
        if not (self.lam > 0 and self.children > 0 and 0 <= self.widening <= 1):
            raise ValueError(f"lam, children and widening: got {self.lam}, {self.children} and {self.widening}, take "
                             "numbers above 0, the last one from 0 to 1")

    @property
    def rows(self) -> int:
        return self.n

    def child(self, tree: CanvasTree, node: int, rng: np.random.Generator) -> int:
        """Returns the child to which a simulation goes."""
        return tree.draw(node, self.lam, rng)

    def leaves(self, tree: CanvasTree, rng: np.random.Generator) -> list[int]:
        """Returns the `n` resulting texts, the answer first."""
        return [tree.walk(self.lam, rng) for _ in range(self.n)]

    def search(self, canvases: Canvases, asked: Sequence[Any]) -> Ranked:
        trees = [CanvasTree() for _ in asked]
        for _ in range(-(-self.simulations // self.n)):
            self._simulate(canvases, trees, asked)
        given = np.array([self.leaves(tree, canvases.rng(p)) for p, tree in enumerate(trees)])
        canvases.recall(given)
        scores = np.array([[tree.value[i] for i in row] for tree, row in zip(trees, given, strict=True)])
        evidence = np.array([self.lam * tree.value[0] for tree in trees])
        return Ranked(scores, np.zeros(len(trees), int), self.weights(scores), evidence)

    def weights(self, scores: np.ndarray) -> np.ndarray | None:
        """Returns the weights of the texts, which are samples."""
        return np.full(scores.shape, 1 / self.n)

    def _simulate(self, canvases: Canvases, trees: list[CanvasTree], asked: Sequence[Any]) -> None:
        """Runs one simulation in each row."""
        shape = len(trees), self.n
        at = np.zeros(shape, int)
        for p, tree in enumerate(trees):
            rng = canvases.rng(p)
            pending: dict[int, int] = {}
            for i in range(self.n):
                at[p, i] = self._select(tree, pending, rng)
        live = np.array([[not trees[p].ended[x] for x in row] for p, row in enumerate(at)])
        if not live.any():
            canvases.generation += 1        # so that the next walks draw other numbers
            return
        canvases.recall(at, live)
        first, running = np.full(shape, -1), live.copy()
        while running.any():
            step, status = canvases.denoise()
            places = np.full(shape, -1)
            for p, i in zip(*np.nonzero(running), strict=True):
                tree, ended = trees[p], status[p, i] != Status.RUNNING
                if step[p, i] - tree.step[at[p, i]] < self.every and not ended:
                    continue
                node = tree.add(int(at[p, i]), int(step[p, i]), bool(ended))
                if first[p, i] < 0:
                    first[p, i] = node
                else:
                    tree.children[at[p, i]].append(node)
                at[p, i] = places[p, i] = node
                running[p, i] = not ended
            canvases.keep(places)
        self._evaluate(canvases, trees, asked, live, at, first, status)

    def _select(self, tree: CanvasTree, pending: dict[int, int], rng: np.random.Generator) -> int:
        """Returns the canvas at which a simulation leaves the tree: one that gets another child, or a finished one."""
        node = 0
        while True:
            tree.visits[node] += 1
            if tree.ended[node]:
                return node
            there, coming = len(tree.children[node]), pending.get(node, 0)
            if not there or there + coming < self.children * tree.visits[node] ** self.widening:
                pending[node] = coming + 1
                return node
            node = self.child(tree, node, rng)

    def _evaluate(self, canvases: Canvases, trees: list[CanvasTree], asked: Sequence[Any], live: np.ndarray,
                  at: np.ndarray,
                  first: np.ndarray, status: np.ndarray) -> None:
        """Computes rewards of finished texts, and updates the values above them."""
        texts = canvases.texts()
        for p, tree in enumerate(trees):
            rows = np.flatnonzero(live[p])
            if not len(rows):
                continue
            got = np.asarray(self.reward(asked[p], [texts[p][i] for i in rows]), np.float64)
            if got.shape != rows.shape or np.isnan(got).any() or (got == np.inf).any():
                raise ValueError(f"reward: got {got!r} for {len(rows)} texts, takes a number for each")
            for i, r in zip(rows, got, strict=True):
                broken = status[p, i] in (Status.INVALID, Status.DEAD_END)
                leaf = int(at[p, i])
                tree.value[leaf] = -math.inf if broken else float(r)
                top = int(first[p, i])
                tree.children[tree.parent[top]].append(top)
                node = leaf
                while node != tree.parent[top]:         # this simulation walked the path once
                    tree.visits[node] += 1
                    node = tree.parent[node]
                tree.back_up(leaf, self.lam)


@SEARCHES.register("dts-star", "Diffusion Tree Sampling: Scalable inference-time alignment of diffusion models",
                   "Jain et al. 2025", "a tree of canvases, searched for the text with the largest reward",
                   model="pycode-diffusion")
@dataclasses.dataclass(frozen=True)
class DTSStar(DTS):
    """Diffusion tree search (Jain et al., 2025, DTS*): `DTS` for the text with the largest reward.

    A simulation goes to the child with the largest soft value, and the best texts that were found are returned.

    Attributes:
        exploration: factor `c` of the bonus `c sqrt(log(visits) / its visits)` that is added to a child's value (UCT).
            0: only the widening of the tree explores.
    """

    exploration: float = 0.0

    def child(self, tree: CanvasTree, node: int, rng: np.random.Generator) -> int:
        children = tree.children[node]
        visits = np.array([tree.visits[c] for c in children])
        bonus = self.exploration * np.sqrt(math.log(tree.visits[node]) / np.maximum(visits, 1))
        return children[int(np.argmax(np.array([tree.value[c] for c in children]) + bonus))]

    def leaves(self, tree: CanvasTree, rng: np.random.Generator) -> list[int]:
        ended = [i for i in range(len(tree.ended)) if tree.ended[i]]
        best = sorted(ended, key=lambda i: -tree.value[i])[:self.n]
        return [*best, *best[:1] * (self.n - len(best))]

    def weights(self, scores: np.ndarray) -> np.ndarray | None:
        return None
