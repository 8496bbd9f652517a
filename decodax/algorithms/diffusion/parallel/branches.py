"""Several canvases in one forward: FreeDave, FreeDave++ and SSD take several steps of a sampler at once.

Drafts are what the next steps would make of the canvas if the current candidates stayed the same. One forward scores
the canvas and all of its drafts. A draft that equals the result of a true canvas is true itself, so its own result is
the sampler's next state. A round therefore takes as many steps as the candidates foresaw correctly, and at least one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.diffusion.policies import Verify, View
from decodax.core.window import take


@dataclasses.dataclass(frozen=True)
class Sequential(Verify):
    """One canvas, one step a forward."""

    taken = ((),)

    def path(self, drafts: View, results: View) -> Array:
        return jnp.ones((drafts.start.shape[0], 1), bool)


def walk(agree: Array) -> Array:
    """`bool[B, K]`: the drafts that a walk from draft 0 visits. From each draft it goes to the last one that `agree`s
    with that draft's result: `agree[b, i, j]` says that draft `j` may follow the result of draft `i`, for `j > i` only.

    >>> walk(jnp.array([[[0, 1, 0], [0, 0, 0], [0, 0, 0]]], bool)).tolist()
    [[True, True, False]]
    """
    number = jnp.arange(agree.shape[1], dtype=jnp.int32)
    at = jnp.zeros(agree.shape[0], jnp.int32)
    passed = jnp.broadcast_to(number == 0, agree.shape[:2])
    for _ in number[1:]:
        at = jnp.maximum(at, jnp.where(take(agree, at), number, 0).max(1))
        passed = passed | (number == at[:, None])
    return passed


def _compare(drafts: View, results: View, loose: bool) -> Array:
    """`bool[B, K, K]`: draft `j` equals the result of draft `i`, and the latter is not done. With `loose`, draft `j`
    may leave more positions open."""
    pair = lambda a, b: (a[:, None] == b[:, :, None])
    tokens, open = pair(drafts.tokens, results.tokens), pair(drafts.open, results.open)
    same = (tokens & open) | drafts.open[:, None] if loose else tokens & open
    left = (results.open & (results.positions < results.end[..., None])).any(-1)
    return same.all(-1) & pair(drafts.end, results.end) & left[:, :, None]


def _exact(steps: tuple[tuple[int, ...], ...], drafts: View, results: View) -> Array:
    """`Verify.path` if a draft is true when it equals the result of a true one and is one step further."""
    taken = np.array([len(own) for own in steps])
    return walk(_compare(drafts, results, loose=False) & (taken == taken[:, None] + 1))


@dataclasses.dataclass(frozen=True)
class BranchExact(Verify):
    """FreeDave (Wu and Zhang 2025) with the rule "exact match": the drafts are the canvas after 1 .. K - 1 more steps.

    The output equals that of one step a forward, token for token, in no more forwards, for every unmasking rule. The
    exception is a cache that is refreshed every few steps: a forward that takes several steps may skip a refresh.

    Attributes:
        branches: `K`, canvases a forward.
    """

    branches: int = 4

    def __post_init__(self) -> None:
        if self.branches < 1:
            raise ValueError(f"branches: got {self.branches}, takes 1 or more")

    @property
    def taken(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(k)) for k in range(self.branches))

    def path(self, drafts: View, results: View) -> Array:
        return _exact(self.taken, drafts, results)


@dataclasses.dataclass(frozen=True)
class BranchLater(BranchExact):
    """FreeDave++ (Wu and Zhang 2025), as in the authors' code: of all later drafts that may follow a result, the last
    one is taken, even if it is several steps further. By the rule "exact match" it equals the result; by the rule
    "subset" it may lack some of the result's tokens.

    With one token a step both rules are `BranchExact`. With an unmasking rule that decides several tokens at once
    (`Threshold`) a result may equal a draft two steps further. By "exact match" the output of a greedy row is still
    that of one step a forward. A sampled row may differ, since draws are addressed by the number of the step. By
    "subset" a row may continue from a draft that lacks some of a result's tokens, so neither its output nor its number
    of forwards need be those of the sampler alone.

    Attributes:
        branches: `K`, canvases a forward. match: "exact" or "subset".
    """

    match: Literal["exact", "subset"] = "subset"

    def path(self, drafts: View, results: View) -> Array:
        later = np.triu(np.ones((self.branches, self.branches), bool), 1)
        # where nothing was left to take, a draft is the one before it, and no step further
        fresh = jnp.pad((drafts.open[:, 1:] != drafts.open[:, :-1]).any(-1), ((0, 0), (1, 0)))
        return walk(_compare(drafts, results, loose=self.match == "subset") & later & fresh[:, None])


@dataclasses.dataclass(frozen=True)
class BranchTree(Verify):
    """Self speculative decoding, SSD (Gao et al. 2025): the drafts take the next steps, those of the surest candidates,
    in several orders, so that a step that comes a little earlier or later than foreseen is found as well.

    The output equals that of one step a forward, token for token, in no more forwards. A draft's children take one of
    the first `top` steps that it has not taken; drafts that took the same steps in another order are one canvas. With
    `top` = 1 it is the chain of `BranchExact`. The paper has a chain and a mixed order; sharing canvases within a tree
    is an addition of this library.

    Attributes:
        length: steps ahead. top: choices at each.
        most: canvases a forward; those of the fewest steps come first.

    >>> BranchTree(2, 2).taken
    ((), (0,), (1,), (0, 1))
    """

    length: int = 3
    top: int = 2
    most: int = 16

    def __post_init__(self) -> None:
        for name in ("length", "top", "most"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")

    @property
    def taken(self) -> tuple[tuple[int, ...], ...]:
        return _orders(self.length, self.top)[:self.most]

    def path(self, drafts: View, results: View) -> Array:
        return _exact(self.taken, drafts, results)


@functools.cache
def _orders(length: int, top: int) -> tuple[tuple[int, ...], ...]:
    level: list[tuple[int, ...]] = [()]
    found = list(level)
    for _ in range(length):
        rest = lambda taken: [i for i in range(length) if i not in taken][:top]
        level = list(dict.fromkeys(tuple(sorted((*taken, i))) for taken in level for i in rest(taken)))
        found += level
    return tuple(found)
