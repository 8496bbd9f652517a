"""What diffusion models train on: problems with answers, or windows of packed text.

A batch is a pure function of (seed, step), as in `pycode_data`: a resumed run sees the same data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import problems
import pycode_data
from diffusion_training import Batch

LENGTH = problems.LONGEST_PROMPT + problems.CANVAS


def rows(found: Sequence[problems.Problem]) -> Batch:
    """Problems as a batch of `LENGTH` tokens a row: the prompt, the answer, end tokens up to the canvas, dead rest."""
    shape = len(found), LENGTH
    tokens, answer, live = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for i, problem in enumerate(found):
        prompt, reply = problems.encode(problem.prompt), problems.encode(problem.answer)
        end = len(prompt) + problems.CANVAS
        tokens[i, :len(prompt) + len(reply)] = prompt + reply
        answer[i, len(prompt):end] = live[i, :end] = True
    return Batch(tokens, answer, live)     # the end token is 0


@dataclass(frozen=True)
class Problems:
    """Batches of problems of random tasks; `weights` are their shares where they are not 1."""

    batch: int
    seed: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed}:{step}")
        shares = [self.weights.get(task, 1.0) for task in problems.TASKS]
        tasks = rng.choices(list(problems.TASKS), shares, k=self.batch)
        return rows([problems.draw(task, rng) for task in tasks])


@dataclass(frozen=True)
class Text:
    """Windows of a packed stream, all of it answer."""

    stream: np.ndarray
    batch: int
    length: int
    seed: int = 0

    def __getitem__(self, step: int) -> Batch:
        tokens = pycode_data.Batches(self.stream, self.batch, self.length, self.seed)[step][:, :-1]
        return Batch(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))


def beginnings(stream: np.ndarray, count: int, length: int, canvas: int, seed: int = 0) -> Batch:
    """`count` beginnings of texts, each with room for an answer of `canvas` tokens: windows of a packed stream, of up
    to `length` tokens in all. Prompts have from half of the room beside the answer to all of it, so that the answers
    begin at any place of a model's blocks.

    Raises:
        ValueError: a stream that is too short.
    """
    if len(stream) < length:
        raise ValueError(f"corpus: got {len(stream)} tokens, takes {length} or more")
    rng = np.random.default_rng([seed, 1])
    tokens = stream[rng.integers(len(stream) - length + 1, size=count)[:, None] + np.arange(length)]
    first = rng.integers((length - canvas + 1) // 2, length - canvas + 1, size=count)[:, None]
    place = np.arange(length)
    live = place < first + canvas
    return Batch(np.where(live, tokens, 0).astype(np.int32), (place >= first) & live, live)


@dataclass(frozen=True)
class Chosen:
    """Rows of a fixed set, any tree of arrays: each epoch visits all of them once, in another order."""

    rows: Any
    batch: int
    seed: int = 0

    def __getitem__(self, step: int) -> Any:
        size = len(jax.tree.leaves(self.rows)[0])
        first = step * self.batch
        order = {e: np.random.default_rng([self.seed, e]).permutation(size)
                 for e in range(first // size, (first + self.batch - 1) // size + 1)}
        index = np.asarray([order[i // size][i % size] for i in range(first, first + self.batch)])
        return jax.tree.map(lambda x: x[index], self.rows)
