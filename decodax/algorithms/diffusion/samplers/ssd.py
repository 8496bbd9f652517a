"""SSD: a tree of drafts that take the next steps in several orders ("Self Speculative Decoding for Diffusion Large
Language Models", Gao et al., 2025)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax import Array

from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Verify
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.samplers.freedave import exact_path, verified
from decodax.algorithms.diffusion.view import View
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class BranchTree(Verify):
    """Drafts take the next steps, those of the most confident candidates, in several orders. So a draft is also
    accepted if a step comes a little earlier or later than expected.

    The output equals that of one step per forward pass, token for token, in no more forward passes. A draft's children
    take one of the first `top` steps that it has not taken; drafts that took the same steps in another order are one
    canvas. With `top` = 1 it is the chain of `BranchExact`. The paper has a chain and a mixed order; sharing canvases
    within a tree is an addition of this library.

    Attributes:
        length: number of steps that drafts look ahead.
        top: number of choices for each step.
        most: maximum number of canvases in a forward pass; those with the fewest steps come first.

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
        return exact_path(self.taken, drafts, results)


@functools.cache
def _orders(length: int, top: int) -> tuple[tuple[int, ...], ...]:
    level: list[tuple[int, ...]] = [()]
    found = list(level)
    for _ in range(length):
        rest = lambda taken: [i for i in range(length) if i not in taken][:top]
        level = list(dict.fromkeys(tuple(sorted((*taken, i))) for taken in level for i in rest(taken)))
        found += level
    return tuple(found)


@ALGORITHMS.register("ssd", "Self Speculative Decoding for Diffusion Large Language Models", "Gao et al. 2025",
                     family="masked-diffusion", guarantee="seed-exact", needs="a diffusion model")
def ssd(lm: Any, length: Count = 3, top: Count = 2, most: Count = 16,
        block_length: Count | None = None) -> MaskedDiffusion:
    """Verifies several orders of LLaDA's next steps as a tree of drafts in one forward pass, with the same output token
    for token.

    Args:
        length: number of steps that drafts look ahead.
        top: number of choices at each step; 1 drafts a chain.
        most: maximum number of canvases in a forward pass.
        block_length: number of positions of a block. None: the model's, or 32.
    """
    return verified(lm, BranchTree(length, top, most), Quota(), block_length)
