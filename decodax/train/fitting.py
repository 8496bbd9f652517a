"""A small trainer for the additional parts of methods, such as predictors, maps and student models, while the model
itself does not change.

`decodax.train.loop` trains whole models, with checkpoints and logs. Training here needs optax (`decodax[train]`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array

from decodax.common.progress import bar

Params = TypeVar("Params")

STEP = 64
"""Texts are padded to a multiple of this length, so that few programs are compiled."""


def train(loss: Callable[..., Array], params: Params, batches: Iterable[Sequence[Any]], optimizer: Any,
          steps: int, progress: bool | str = False, state: Any = None) -> tuple[Params, Any]:
    """Minimizes a loss, with one batch in each step.

    Args:
        loss: returns `f32[]` for `params` and the arrays of a batch; it is compiled once for each combination of their
            shapes.
        params: the initial parameters, a pytree.
        batches: at least `steps` batches, the arguments of `loss` after `params`.
        optimizer: an `optax.GradientTransformation`.
        steps: number of steps.
        progress: title of a progress bar; False: none is shown.
        state: state of the optimizer from an earlier call; None: a new one.

    Returns:
        The trained parameters, and the state of the optimizer.
    """
    import optax  # only for those who train

    @jax.jit
    def step(params: Params, state: Any, batch: Sequence[Any]) -> tuple[Params, Any]:
        change, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, change), state

    state = optimizer.init(params) if state is None else state
    with bar(bool(progress), str(progress), steps) as report:
        for i, batch in zip(range(steps), batches, strict=False):
            params, state = step(params, state, batch)
            report(i + 1)
    return params, state


def shuffled(count: int, batch: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields arrays of `batch` indices, `i64[batch]`, forever: random permutations of all `count` examples, one after
    the other."""
    order: np.ndarray = np.zeros(0, np.int64)
    while True:
        while len(order) < batch:
            order = np.concatenate([order, random.permutation(count)])
        yield order[:batch]
        order = order[batch:]


def padded(texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns texts as `i32[B, N]`, padded with zeros to the length of the longest, rounded up to a multiple of `STEP`.
    """
    tokens = np.zeros((len(texts), -(-max(map(len, texts)) // STEP) * STEP), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[:len(text)] = text
    return tokens
