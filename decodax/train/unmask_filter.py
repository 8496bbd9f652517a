"""Trains the filter of Learn2PD (Bao et al., 2025), which predicts whether the candidate tokens of a block are final.

The inputs of the filter are the block's confidences: the model's probability of its best candidate at each position. It
is trained on *extremely greedy parallel* decoding, which knows the model's final text and unmasks in each step every
candidate that equals it. As in the authors' code, it has two layers of the width of the block, and positions that are
already filled count in the loss, with the model's confidences there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save_file

from decodax.common.struct import Struct, struct
from decodax.models import Diffusion, Transformer
from decodax.train.masked_diffusion import Batch, predict

Tree = Any


@struct
class FilterExamples(Struct):
    """Training examples of a filter that predicts whether a masked position's most likely token is the one it will have
    in the end: steps of greedy decoding.

    Attributes:
        confidence: `f32[N, n]`, confidences at the `n` positions of a block.
        final: `bool[N, n]`, True where the candidate is final.
    """

    confidence: Array
    final: Array


def init_filter(key: Array, span: int) -> Tree:
    """Returns the initial weights of the filter, two linear layers from `span` confidences to `span` logits, uniform
    within `span ** -0.5`, as torch initializes them."""
    draw = lambda key, *shape: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) * span ** -0.5
    first, second, third, fourth = jax.random.split(key, 4)
    return {"hidden": {"kernel": draw(first, span, span), "bias": draw(second, span)},
            "out": {"kernel": draw(third, span, span), "bias": draw(fourth, span)}}


def apply_filter(params: Tree, confidence: Array) -> Array:
    """Returns the logits, `f32[..., n]`, that the most confident token at each of the `n` positions of a block is its
    final one, from the model's confidences there, `f32[..., n]`."""
    hidden = jax.nn.relu(confidence @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


@dataclass(frozen=True)
class FilterLoss:
    """The training loss of the filter (an `Objective`): the binary cross-entropy of its prediction that a position's
    candidate token is final, averaged over positions."""

    def __call__(self, params: Tree, batch: FilterExamples, key: Array) -> tuple[Array, dict[str, Array]]:
        logits = apply_filter(params, batch.confidence)
        loss = (jax.nn.softplus(logits) - logits * batch.final).mean()
        return loss, {"loss": loss, "accuracy": ((logits > 0) == batch.final).mean()}


def figures(params: Tree, examples: FilterExamples, threshold: float = 0.9) -> dict[str, float]:
    """Returns measurements of the filter on examples: its cross-entropy ("filter_loss"), the share of candidate tokens
    whose predicted probability to be final exceeds `threshold` ("passed"), and the share of these that are not final
    ("wrongly")."""
    logits = apply_filter(params, examples.confidence)
    passed = jax.nn.sigmoid(logits) > threshold
    loss, _ = FilterLoss()(params, examples, jax.random.key(0))
    return {"filter_loss": float(loss), "passed": float(passed.mean()),
            "wrongly": float((passed & ~examples.final).sum() / jnp.maximum(passed.sum(), 1))}


@partial(jax.jit, static_argnames=("network", "kind", "span", "longest"))
def rollout(network: Transformer, params: Tree, batch: Batch, kind: Diffusion, span: int,
            longest: int | None = None) -> tuple[Array, Array, Array]:
    """Decodes towards `batch.tokens` block by block, by extremely greedy parallel decoding.

    Args:
        network: the model.
        params: its weights.
        batch: rows with their final texts.
        kind: the kind of diffusion model.
        span: number of tokens of a block.
        longest: number of tokens of the longest answer, each of which takes at most two steps; None: the length of a
            row.

    Returns:
        Three arrays for `S` steps: confidences `f32[B, S, span]`; True where a candidate is final, `bool[B, S, span]`;
            True where the row took the step, `bool[B, S]`. A block ends when it is full. If no candidate has changed
            since the last step, all its positions are filled, as in the authors' code.
    """
    place = jnp.cumsum(batch.answer, 1) - 1
    first = batch.answer.argmax(1)
    steps = longest or batch.tokens.shape[1]

    def body(state: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], Any]:
        tokens, before, block = state
        logits = predict(network, params, tokens, batch.live, kind, answer=batch.answer)
        best = logits.argmax(-1).astype(jnp.int32)
        sure = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))
        here = batch.answer & (place // span == block[:, None])
        index = jnp.minimum(first[:, None] + block[:, None] * span + jnp.arange(span), tokens.shape[1] - 1)
        take = lambda x: jnp.take_along_axis(x, index, 1)
        right = best == batch.tokens
        stuck = (take(best) == before).all(1, keepdims=True)
        taken = here.any(1)
        filled = jnp.where(here & (right | stuck), batch.tokens, tokens)
        done = ~((filled == kind.mask) & here).any(1)
        before = jnp.where(done[:, None], -1, take(best))
        return (filled, before, block + (done & taken)), (take(sure), take(right), taken)

    start = jnp.where(batch.answer, kind.mask_token, batch.tokens)
    state = start, jnp.full((start.shape[0], span), -1), jnp.zeros(start.shape[0], jnp.int32)
    found = jax.lax.scan(body, state, None, length=2 * steps)[1]
    return tuple(jnp.moveaxis(x, 0, 1) for x in found)  # type: ignore[return-value]


def collect(network: Transformer, params: Tree, batch: Batch, kind: Diffusion, span: int,
            size: int = 256) -> FilterExamples:
    """Returns the training examples of all rows of a batch, computed for `size` rows at a time."""
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    size, longest = min(size, len(batch.tokens)), int(batch.answer.sum(1).max())
    for at in range(0, len(batch.tokens), size):
        rows = jax.tree.map(lambda x, at=at: jnp.asarray(np.resize(x[at:at + size], (size, x.shape[1]))), batch)
        confidence, final, taken = map(np.asarray, rollout(network, params, rows, kind, span, longest))
        taken = taken & (np.arange(size) < len(batch.tokens) - at)[:, None]
        parts.append((confidence[taken], final[taken]))
    found: Any = [np.concatenate(x) for x in zip(*parts, strict=True)]      # on the host: batches are drawn from them
    return FilterExamples(*found)


def save_filter(path: Path, params: Tree) -> None:
    """Writes the weights of the filter as safetensors; kernels are `[in, out]`."""
    flat = {f"{layer}.{name}": np.asarray(x) for layer, part in params.items() for name, x in part.items()}
    save_file(flat, path)
