"""Searches over a tree of canvases: the denoising of a masked diffusion model, guided by a reward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.common.options import Count, NonNegative, Positive, Share
from decodax.common.registry import SEARCHES
from decodax.core.state import Status
from decodax.search.canvases import Canvases
from decodax.search.explorer import CanvasExplorer, Ranked, Score, log_mean, normal


@dataclasses.dataclass
class CanvasTree:
    """The tree of canvases of one prompt. Canvases are numbered; 0 is the initial one, and a child is its parent after
    more denoising steps.

    Attributes:
        parent: number of each canvas's parent, -1 for canvas 0.
        children: numbers of each canvas's children.
        value: soft value `v` of each canvas, an estimate of `log E exp(lam reward) / lam` over the texts below it.
        visits: number of simulations that passed through each canvas.
        ended: True if no position of the canvas is masked.
        step: number of denoising steps before each canvas.
    """

    parent: list[int] = dataclasses.field(default_factory=lambda: [-1])
    children: list[list[int]] = dataclasses.field(default_factory=lambda: [[]])
    value: list[float] = dataclasses.field(default_factory=lambda: [0.0])
    visits: list[int] = dataclasses.field(default_factory=lambda: [0])
    ended: list[bool] = dataclasses.field(default_factory=lambda: [False])
    step: list[int] = dataclasses.field(default_factory=lambda: [0])

    def add(self, parent: int, step: int, ended: bool) -> int:
        """Adds a canvas and returns its number.

        This sets the canvas's parent, but does not change `children[parent]`: the caller appends the number there once
        the canvas has a value.

        Args:
            parent: number of the parent canvas.
            step: number of denoising steps before the canvas.
            ended: True if no position of the canvas is masked.
        """
        self.parent.append(parent)
        self.children.append([])
        self.value.append(-math.inf)
        self.visits.append(0)
        self.ended.append(ended)
        self.step.append(step)
        return len(self.parent) - 1

    def back_up(self, node: int, lam: float) -> None:
        """Recomputes `v(x) = log(mean over children of exp(lam v)) / lam` for all ancestors of canvas `node`, up to the
        root."""
        while (node := self.parent[node]) >= 0:
            self.value[node] = float(log_mean(lam * np.array([self.value[c] for c in self.children[node]]))) / lam

    def walk(self, lam: float, rng: np.random.Generator) -> int:
        """Draws a finished canvas: goes from the root to a child drawn with probability proportional to `exp(lam v)`,
        and on."""
        node = 0
        while not self.ended[node]:
            node = self.draw(node, lam, rng)
        return node

    def draw(self, node: int, lam: float, rng: np.random.Generator) -> int:
        """Draws a child of canvas `node` with probability proportional to `exp(lam v)`."""
        children = self.children[node]
        return children[int(rng.choice(len(children), p=normal(lam * np.array([self.value[c] for c in children]))))]


@SEARCHES.register("dts", "Diffusion Tree Sampling: Scalable inference-time alignment of diffusion models",
                   "Jain et al. 2025",
                   "a tree of canvases, whose leaves are samples of the model times the exponential of a reward",
                   model="pycode-diffusion")
@dataclasses.dataclass(frozen=True)
class DTS(CanvasExplorer):
    """Diffusion tree sampling (Jain et al., 2025, DTS): samples from `p(x) exp(lam reward(x))`, where `p` is the
    distribution of a masked diffusion sampler (`algorithm=`, any of them).

    Canvases form a tree in which a child is its parent after more denoising steps. One simulation

    1. goes from the root to children drawn with probability proportional to `exp(lam v)`, until it reaches a canvas
       with fewer children than `children * visits ** widening`;
    2. denoises a new child of that canvas, and from it on to the end; all canvases on the way join the tree;
    3. sets the soft value `v` of the leaf to the reward of its text, and updates `v(x) = log(mean over children of
       exp(lam v)) / lam` up to the root.

    A simulation that ends at a leaf of the tree costs nothing. After all simulations, texts are drawn by walks down the
    tree; their distribution approaches the target as the tree grows.

    `n` simulations run side by side on the same tree; only visits and children that are still denoised are counted at
    once. `log_evidence` is `lam v` of the root, an estimate of `log E exp(lam reward)`.

    Attributes:
        reward: scores whole texts; -inf excludes one.
        lam: weight of the reward.
        n: number of simulations that run at once, and number of texts that are drawn.
        simulations: number of simulations of each prompt.
        children: factor of the maximum number of children.
        widening: exponent of the maximum number of children; 0 makes the maximum constant.
        every: number of denoising steps between two canvases of the tree. Larger values store fewer canvases; the
            target distribution is the same.
    """

    reward: Score
    lam: Positive = 1.0
    n: Count = 8
    simulations: Count = 64
    children: Positive = 1.0
    widening: Share = 0.8
    every: Count = 1

    def child(self, tree: CanvasTree, node: int, rng: np.random.Generator) -> int:
        """Returns the number of the child of canvas `node` to which a simulation goes: one drawn with probability
        proportional to `exp(lam v)`, with `v` its soft value."""
        return tree.draw(node, self.lam, rng)

    def leaves(self, tree: CanvasTree, rng: np.random.Generator) -> list[int]:
        """Returns the numbers of `n` finished canvases of the tree whose texts are the result; the first one is the
        answer. Each is drawn by a walk from the root (`CanvasTree.walk`)."""
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
        """Returns the weight of each resulting text, `1 / n` for samples."""
        return np.full(scores.shape, 1 / self.n)

    def _simulate(self, canvases: Canvases, trees: list[CanvasTree], asked: Sequence[Any]) -> None:
        """Runs one simulation in each row, and adds its canvases to the trees."""
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
        """Returns the canvas from which a simulation denoises a new child, or a finished canvas."""
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
        """Computes the rewards of finished texts, and updates the values of their canvases and of all ancestors."""
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
    """Diffusion tree search (Jain et al., 2025, DTS*): finds texts with a large reward, on the tree of `DTS`.

    A simulation goes to the child with the largest soft value instead of a random one. The result is the best texts
    that were found.

    Attributes:
        exploration: factor `c` of the bonus `c sqrt(log(visits of the parent) / visits of the child)` that is added to
            a child's value (UCT). 0: only the growing maximum number of children makes the search explore.
    """

    exploration: NonNegative = 0.0

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
