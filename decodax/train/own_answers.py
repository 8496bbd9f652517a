"""A masked diffusion model's own answers to prompts, as rows to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.models import Diffusion, Transformer
from decodax.train.masked_diffusion import Batch
from decodax.train.masked_diffusion import fill as fill_batch


def unanswered(prompts: Sequence[Sequence[int]], length: int, canvas: int) -> Batch:
    """Returns a batch of prompts as rows of `length` tokens, each followed by `canvas` positions that are marked as the
    answer, with token 0. A prompt longer than `length - canvas` loses its first tokens."""
    shape = len(prompts), length
    tokens, answer, live = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for i, prompt in enumerate(prompts):
        own = list(prompt)[-(length - canvas):]
        end = len(own) + canvas
        tokens[i, :len(own)] = own
        answer[i, len(own):end] = live[i, :end] = True
    return Batch(tokens, answer, live)       # type: ignore[arg-type]


def beginnings(stream: np.ndarray, count: int, length: int, canvas: int, seed: int = 0) -> Batch:
    """Returns `count` windows of a packed stream: prompts with room for an answer of `canvas` tokens after them.

    A window has up to `length` tokens. Prompts take from half to all of the room beside the answer, so that answers
    begin at any position of a model's blocks.
    """
    if len(stream) < length:
        raise ValueError(f"corpus: got {len(stream)} tokens, takes {length} or more")
    rng = np.random.default_rng([seed, 1])
    tokens = stream[rng.integers(len(stream) - length + 1, size=count)[:, None] + np.arange(length)]
    first = rng.integers((length - canvas + 1) // 2, length - canvas + 1, size=count)[:, None]
    place = np.arange(length)
    live = place < first + canvas
    return Batch(np.where(live, tokens, 0).astype(np.int32), (place >= first) & live, live)       # type: ignore[arg-type]


def chosen(rows: Any, count: int, seed: int, step: int) -> Any:
    """Returns the rows of a step of a fixed set (a tree of arrays): each epoch visits every row once, in a new order.
    """
    size, first = len(jax.tree.leaves(rows)[0]), step * count
    order = {e: np.random.default_rng([seed, e]).permutation(size)
             for e in range(first // size, (first + count - 1) // size + 1)}
    index = np.asarray([order[i // size][i % size] for i in range(first, first + count)])
    return jax.tree.map(lambda x: x[index], rows)


def fill(model: Transformer, kind: Diffusion, params: Any, batch: Batch, size: int = 512, at_once: bool = False,
         span: int | None = None) -> np.ndarray:
    """Returns the rows of a batch with their answers filled greedily by the model, `i32[B, T]`, computed for `size`
    rows at a time; `at_once` fills a whole block in each forward pass, and `span` is the number of tokens of a block,
    as in `masked_diffusion.fill`."""
    out = []
    for at in range(0, len(batch.tokens), size):
        count = min(size, len(batch.tokens) - at)
        rows = jax.tree.map(lambda x, at=at: jnp.asarray(np.resize(x[at:at + size], (size, x.shape[1]))), batch)
        out.append(np.asarray(fill_batch(model, params, rows, kind, at_once, span))[:count])
    return np.concatenate(out)
