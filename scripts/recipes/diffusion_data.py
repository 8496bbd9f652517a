"""Batches of diffusion models: problems with answers, windows of text, or a fixed set of rows.

A batch is a pure function of (seed, step), so a resumed run sees the same data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from decodax.train import corpus
from decodax.train.masked_diffusion import Batch
from recipes import problems

LENGTH = problems.LONGEST_PROMPT + problems.CANVAS


def rows_of(found: Sequence[problems.Problem]) -> Batch:
    """Returns problems as rows of `LENGTH` tokens: prompt, answer, end tokens up to the canvas, and tokens that are not
    live."""
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
    """Batches of problems of random tasks; `weights` are the shares of tasks that are not 1."""

    batch: int
    seed: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed}:{step}")
        shares = [self.weights.get(task, 1.0) for task in problems.TASKS]
        tasks = rng.choices(list(problems.TASKS), shares, k=self.batch)
        return rows_of([problems.draw(task, rng) for task in tasks])


@dataclass(frozen=True)
class Text:
    """Windows of a packed stream, all of it answer."""

    stream: np.ndarray
    batch: int
    length: int
    seed: int = 0

    def __getitem__(self, step: int) -> Batch:
        tokens = corpus.Batches(self.stream, self.batch, self.length, self.seed)[step][:, :-1]
        return Batch(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))


def beginnings(stream: np.ndarray, count: int, length: int, canvas: int, seed: int = 0) -> Batch:
    """Returns `count` windows of a packed stream: prompts with room for an answer of `canvas` tokens after them.

    A window has up to `length` tokens. Prompts take from half to all of the room beside the answer, so that answers
    begin at any position of a model's blocks.

    Raises:
        ValueError: the stream is too short.
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
    """Batches of the rows of a fixed set (a tree of arrays): each epoch visits every row once, in another order."""

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
