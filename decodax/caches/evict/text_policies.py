"""Published cache policies that know what a token is, each as what its paper puts together; see
`decodax.caches.evict.policies`."""

from __future__ import annotations

from typing import Any

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.marks import read_marks
from decodax.caches.evict.selection import Budget
from decodax.caches.evict.shots import ShotAttention, Shots
from decodax.caches.evict.subtasks import SubtaskPruning
from decodax.caches.evict.vision import ImageAttention, ImageShares
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig

EVERYTHING = 1 << 30
"""A budget in tokens that no text has."""


@CACHES.register("shotkv", "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?", "Liu et al. 2025",
                 "whole examples of a prompt, by the mean attention to their tokens, and of what follows single tokens")
def _shotkv(budget: Budget = 2048, pool: int = 512, every: int = 32, window: int = 32,
            separator: Any = None) -> CacheConfig:
    marks = None if separator is None else read_marks(separator, "separator")
    return Eviction(Shots(ShotAttention(window, marks), pool), budget, every, name="shotkv")


@CACHES.register("tim", "Beyond Context Limits: Subconscious Threads for Long-Horizon Reasoning", "Luo et al. 2025",
                 "everything but lists of subtasks that are finished, given the marks around them; what stands behind "
                 "is computed anew")
def _tim(open: Any = (), close: Any = (), depth: int = 2, every: int = 16) -> CacheConfig:
    return SubtaskPruning(read_marks(open, "open"), read_marks(close, "close"), depth, every)


@CACHES.register("plphp", "PLPHP: Per-Layer Per-Head Vision Token Pruning for Efficient Large Vision-Language Models",
                 "Meng et al. 2025", "all text, and of the image tokens of a prompt those that the newest token "
                 "attends to, more in layers that attend to them more")
def _plphp(image: tuple[int, int] | None = None, rate: float | None = None, change: float | None = None,
           attentive: float | None = None, indifferent: float | None = None, budget: Budget | None = None,
           skip: tuple[int, ...] = ()) -> CacheConfig:
    if image is None or len(image) != 2 or not 0 <= image[0] <= image[1]:
        raise ValueError(f"image: got {image!r}, takes the first and the last id of the model's image tokens")
    if rate is None or change is None or attentive is None or indifferent is None:
        raise ValueError(f"rate, change, attentive, indifferent: got {rate}, {change}, {attentive} and {indifferent}; "
                         "the numbers of the paper are those of its models, so plphp takes all four")
    shares = ImageShares(ImageAttention(image), rate, change, attentive, indifferent)
    return Eviction(shares, EVERYTHING if budget is None else budget, None, skip, name="plphp")
