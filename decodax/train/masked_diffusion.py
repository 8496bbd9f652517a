"""Losses of masked diffusion models, the noise for their training, and greedy filling of masks.

There are three losses; the first two are upper bounds on the negative log-likelihood:

- *masked diffusion* (LLaDA, Nie et al., 2025): every token attends to every token. Each row has a noise level `t ~ U(0,
  1)`, each answer token is masked with probability `t`, and the cross-entropy at masked tokens is weighted by `1 / t`;
- *block diffusion* (BD3-LM, Arriola et al., 2025; SDAR, Cheng et al., 2025): each block has a noise level, and a noisy
  block attends to itself and to the clean blocks before it. One forward pass serves all blocks: its input is the noisy
  text followed by the clean text, with a mask that lets each noisy block attend to the right clean ones;
- *set block decoding* (Gat et al., 2025): block diffusion with a causal clean text that also learns to predict its next
  tokens. Blocks are counted from the beginning of the answer, as the sampler counts them.

Noise levels are stratified over the batch (the low-discrepancy sampler of MDLM, Sahoo et al., 2024): row `i` of `B`
draws from `[i/B, (i+1)/B)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.models import Diffusion, Transformer
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast

Tree = Any

LEAST = 1e-3
"""Lowest noise level, as in the code of LLaDA and MDLM; it bounds the weight `1 / t`."""


@struct
class Batch(Struct):
    """A batch of clean sequences.

    Attributes:
        tokens: `i32[B, T]`.
        answer: `bool[B, T]`, True for the tokens that may be masked and are learned; the prompt stays clean.
        live: `bool[B, T]`, True where the sequence has a token; it begins at position 0 and has no gaps.
    """

    tokens: Array
    answer: Array
    live: Array


def widened(params: Tree, spread: float) -> Tree:
    """Returns weights whose kernels are multiplied by `spread`, for a wider initialization."""
    by = lambda path, x: x * spread if getattr(path[-1], "key", None) == "kernel" else x
    return jax.tree_util.tree_map_with_path(by, params)


def check(kind: Diffusion) -> None:
    """Checks that models of this kind can be trained.

    Raises:
        ValueError: models of this kind cannot be trained.
    """
    if kind.attention in ("causal", "any-subset"):
        raise ValueError(f"attention: got {kind.attention}, takes full, block-causal or causal-prefix")
    if kind.attention != "full" and kind.shift:
        raise ValueError("shift: got True with blocks, takes False: a block is not visible to the token before it")


def blocks(kind: Diffusion, answer: Array) -> Array:
    """Returns the block number of each position, `i32[B, T]`; 0 everywhere if there are no blocks.

    Blocks are counted from the first token. After a causal prefix they are counted from the first token of the answer
    (`bool[B, T]`); tokens before it have negative numbers.

    >>> blocks(Diffusion(9, attention="causal-prefix", block=2), jnp.arange(6)[None] > 2).tolist()
    [[-2, -1, -1, 0, 0, 1]]
    """
    place = jnp.broadcast_to(jnp.arange(answer.shape[1]), answer.shape)
    if kind.block is None:
        return jnp.zeros_like(place)
    start = answer.argmax(1)[:, None] if kind.attention == "causal-prefix" else 0
    return (place - start) // kind.block


def visible(live: Array, at: Array, front: Array | None = None) -> Array:
    """Returns the attention mask at decoding time, `bool[B, T, T]`: a token attends to all live tokens that are not in
    a later block.

    Args:
        live: `bool[B, T]`, True where a sequence has a token.
        at: block numbers, `i32[B, T]`.
        front: `i32[B]`, number of tokens at the start whose attention is causal; None: none.

    >>> visible(jnp.ones((1, 4), bool), jnp.array([[0, 0, 1, 1]]))[0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    >>> visible(jnp.ones((1, 4), bool), jnp.array([[0, 0, 1, 1]]), jnp.array([2]))[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    T = live.shape[1]
    seen = live[:, None, :] | jnp.eye(T, dtype=bool)
    before = at[:, None, :] <= at[:, :, None]
    if front is not None:
        before &= (jnp.arange(T) >= front[:, None])[:, :, None] | jnp.tri(T, dtype=bool)
    return seen & before


def visible_twice(live: Array, at: Array, causal: bool = False) -> Array:
    """Returns the attention mask of the noisy text followed by the clean text, `bool[B, 2T, 2T]`.

    A noisy block attends to itself and to earlier clean blocks. A clean block attends to itself and to earlier clean
    blocks; with `causal`, each clean token attends to the clean tokens up to itself instead. No clean token attends to
    a noisy one. `live` and `at` are as in `visible`.
    """
    T = live.shape[1]
    same, before = at[:, None, :] == at[:, :, None], at[:, None, :] < at[:, :, None]
    clean = jnp.broadcast_to(jnp.tri(T, dtype=bool), same.shape) if causal else same | before
    mask = jnp.concatenate([jnp.concatenate([same, before], 2),
                            jnp.concatenate([jnp.zeros_like(same), clean], 2)], 1)
    return (mask & jnp.tile(live, (1, 2))[:, None, :]) | jnp.eye(2 * T, dtype=bool)


def noise_levels(key: Array, rows: int, blocks: int = 1) -> Array:
    """Returns noise levels in `(LEAST, 1]`, `f32[rows, blocks]`, stratified over the rows with a random offset for each
    block. A noise level is the probability that a token is masked."""
    start = jax.random.uniform(key, (1, blocks))
    strata = (jnp.arange(rows)[:, None] / rows + start) % 1.0
    return LEAST + (1 - LEAST) * strata


def corrupt(key: Array, batch: Batch, kind: Diffusion) -> tuple[Array, Array, Array]:
    """Draws noise for a batch: each block of an answer (without blocks, the whole answer) has a noise level, which is
    the probability that a token is masked.

    Returns:
        Noisy tokens, `i32[B, T]`; True where a token is masked, `bool[B, T]`; the noise level of each token, `f32[B,
        T]`.
    """
    B, T = batch.tokens.shape
    size = T if kind.block is None else kind.block
    keys = jax.random.split(key)
    count = -(-T // size)
    levels = jnp.take_along_axis(noise_levels(keys[0], B, count), blocks(kind, batch.answer) % count, 1)
    masked = (jax.random.uniform(keys[1], (B, T)) < levels) & batch.answer
    return jnp.where(masked, kind.mask_token, batch.tokens), masked, levels


def apart(mask: Array, answer: Array, rows: Array) -> Array:
    """Returns an attention mask, `bool[B, T, T]`, in which the prompt does not attend to the answer (`bool[B, T]`) in
    the given `rows` (`bool[B]`)."""
    return mask & ~(rows[:, None, None] & ~answer[:, :, None] & answer[:, None, :])


def predict(network: Transformer, params: Tree, tokens: Array, live: Array, kind: Diffusion,
            clean: Array | None = None, blind: tuple[Array, Array] | None = None,
            answer: Array | None = None) -> Array:
    """Returns logits `f32[B, T, V]` at the positions of the tokens that they predict; the mask token has probability 0.

    Args:
        network: the model.
        params: its weights.
        tokens: noisy tokens, `i32[B, T]`.
        live: `bool[B, T]`, True where a sequence has a token.
        kind: the kind of diffusion model.
        clean: the tokens without noise, for a training step with blocks. None: blocks attend to `tokens`, as at
            decoding time.
        blind: the answers and the rows for `apart`; only without blocks.
        answer: `bool[B, T]`, the answer, if blocks begin after a causal prefix; None: the whole text.
    """
    if clean is not None and kind.block is not None:
        return predict_twice(network, params, tokens, live, kind, clean, answer)[0]
    at = blocks(kind, jnp.ones_like(live) if answer is None else answer)
    mask = visible(live, at, front(tokens, at, kind) if kind.attention == "causal-prefix" else None)
    logits = network.forward(params, tokens, mask=mask if blind is None else apart(mask, *blind))
    if kind.shift:
        logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], 1)
    return logits.at[..., kind.mask_token].set(-jnp.inf)


def front(tokens: Array, at: Array, kind: Diffusion) -> Array:
    """Returns the position at which the first block with a masked token begins in each row of `tokens`, `i32[B, T]`:
    `i32[B]`; `T` if there is none. `at`, `i32[B, T]`, are the block numbers of the positions."""
    last = at.max() + 1
    current = jnp.where(tokens == kind.mask_token, at, last).min(1, keepdims=True)
    return jnp.where(current == last, at.shape[1], (at >= current).argmax(1, keepdims=True))[:, 0]


def predict_twice(network: Transformer, params: Tree, tokens: Array, live: Array, kind: Diffusion, clean: Array,
                  answer: Array | None = None) -> tuple[Array, Array]:
    """Returns the logits of `predict` for a training step with blocks, and the next-token logits of the clean text,
    both `f32[B, T, V]`. The arguments are those of `predict`."""
    T = tokens.shape[1]
    where = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
    at = blocks(kind, jnp.ones_like(live) if answer is None else answer)
    hidden, head = network.features(params, jnp.concatenate([tokens, clean], 1), jnp.concatenate([where, where], 1),
                                    visible_twice(live, at, kind.attention == "causal-prefix"))
    noisy, plain = (head(x).at[..., kind.mask_token].set(-jnp.inf) for x in (hidden[:, :T], hidden[:, T:]))
    return noisy, plain


@dataclass(frozen=True)
class Bound:
    """The loss of masked or block diffusion: the cross-entropy at masked tokens divided by the noise level `t` (the
    probability with which the token was masked), summed over a row, divided by its number of answer tokens, and
    averaged over rows.

    This is the loss of LLaDA's fine-tuning, and with blocks that of BD3-LM. After a causal prefix, the cross-entropy of
    the clean text's next tokens is added with equal weight, as in set block decoding.

    Attributes:
        network: the model.
        kind: the kind of diffusion model.
        dtype: dtype of the computation.
        apart: share of rows whose prompt does not attend to the answer. A small model that uses the prompt's positions
            as memory fails when the prompt comes from a cache, unless it was trained with such rows.
    """

    network: Transformer
    kind: Diffusion
    dtype: str = "float32"
    apart: float = 0.0

    def __call__(self, params: Tree, batch: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the loss in nats, an upper bound of the negative log-likelihood of an answer token, and scalars to
        log: cross-entropy and accuracy at masked tokens."""
        nats, masked, levels, right, following = self.parts(params, batch, key)
        each = lambda x: (x.sum(1) / jnp.maximum(batch.answer.sum(1), 1)).mean()
        loss = each(nats / levels)
        if self.kind.attention == "causal-prefix":
            loss += each(following)
        count = jnp.maximum(masked.sum(), 1)
        return loss, {"loss": loss, "cross_entropy": nats.sum() / count, "accuracy": right.sum() / count}

    def parts(self, params: Tree, batch: Batch, key: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Draws noise and returns five arrays `[B, T]`.

        Returns:
            The cross-entropy in nats, 0 at positions that are not masked; True where a token is masked; the noise
            level; True where a masked token is predicted correctly; the cross-entropy in nats of the answer token given
            the clean text before it, 0 without a causal prefix.
        """
        noisy, masked, levels = corrupt(key, batch, self.kind)
        blind = None
        if self.apart:
            rows = jax.random.uniform(jax.random.fold_in(key, 2), noisy.shape[:1]) < self.apart
            blind = batch.answer, rows
        params, following = cast(params, self.dtype), jnp.zeros(noisy.shape)
        if self.kind.attention == "causal-prefix":
            logits, plain = predict_twice(self.network, params, noisy, batch.live, self.kind, batch.tokens,
                                          batch.answer)
            own = cross_entropy(plain[:, :-1], batch.tokens[:, 1:])
            following = following.at[:, 1:].set(jnp.where(batch.answer[:, 1:], own, 0.0))
        else:
            logits = predict(self.network, params, noisy, batch.live, self.kind, batch.tokens, blind)
        nats = jnp.where(masked, cross_entropy(logits, jnp.where(masked, batch.tokens, 0)), 0.0)
        return nats, masked, levels, masked & (logits.argmax(-1) == batch.tokens), following


@dataclass(frozen=True)
class CertaintyForcing:
    """dParallel's distillation (Chen et al., 2025): the model learns to be certain of several tokens of its own answers
    at once.

    One block of each row's answer is drawn. Tokens before it are clean, tokens after it masked, and each token in it is
    masked with probability `ratio`. The loss is the cross-entropy at the masked tokens of the block plus `weight` times
    the entropy, at `temperature`, at those that are predicted correctly. The same step also learns the complement, in
    which the other tokens of the block are masked, as in the authors' code.

    Attributes:
        network: the model.
        kind: the kind of diffusion model.
        dtype: dtype of the computation.
        span: number of tokens of a block, counted from the beginning of the answer.
        ratio: probability that a token of the block is masked.
        temperature: temperature of the entropy.
        weight: factor of the entropy.
    """

    network: Transformer
    kind: Diffusion
    dtype: str = "float32"
    span: int = 16
    ratio: float = 0.5
    temperature: float = 0.5
    weight: float = 2.0

    def __call__(self, params: Tree, batch: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        first, second = self.noise(key, batch)
        loss, figures = jnp.float32(0), []
        for masked, noisy in (first, second):
            logits = predict(self.network, cast(params, self.dtype), noisy, batch.live, self.kind,
                             answer=batch.answer)
            figures.append(self.terms(logits, batch.tokens, masked))
            loss += figures[-1]["cross_entropy"] + self.weight * figures[-1]["entropy"]
        return loss, {"loss": loss, **{k: (a + figures[1][k]) / 2 for k, a in figures[0].items()}}

    def noise(self, key: Array, batch: Batch) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Returns two pairs, for the draw and for its complement: the masked tokens of the block, `bool[B, T]`, and the
        noisy text, `i32[B, T]`."""
        keys = jax.random.split(key)
        block = jnp.where(batch.answer, (jnp.cumsum(batch.answer, 1) - 1) // self.span, -1)
        count = block.max(1) + 1
        active = (jax.random.uniform(keys[0], count.shape) * count).astype(jnp.int32)[:, None]
        here, later = batch.answer & (block == active), batch.answer & (block > active)
        drawn = jax.random.uniform(keys[1], batch.tokens.shape) < self.ratio
        each = lambda masked: (masked, jnp.where(masked | later, self.kind.mask_token, batch.tokens))
        return each(here & drawn), each(here & ~drawn)

    def terms(self, logits: Array, tokens: Array, masked: Array) -> dict[str, Array]:
        """Returns the mean cross-entropy of the masked tokens, the mean entropy at the correctly predicted ones, and
        the share of the latter."""
        nats = jnp.where(masked, cross_entropy(logits, jnp.where(masked, tokens, 0)), 0.0)
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32) / self.temperature)
        entropy = -jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * jnp.where(jnp.isfinite(log_p), log_p, 0.0), 0.0)
        right = masked & (logits.argmax(-1) == tokens)
        count, sure = jnp.maximum(masked.sum(), 1), jnp.maximum(right.sum(), 1)
        return {"cross_entropy": nats.sum() / count, "entropy": jnp.where(right, entropy.sum(-1), 0.0).sum() / sure,
                "accuracy": right.sum() / count}


@partial(jax.jit, static_argnames=("network", "kind", "at_once", "span"))
def fill(network: Transformer, params: Tree, batch: Batch, kind: Diffusion, at_once: bool = False,
         span: int | None = None) -> Array:
    """Returns rows whose answers are filled greedily by the model, block by block, `i32[B, T]`, as training data or to
    measure it; the tokens at answers in `batch` are not read. A forward pass fills the most confident masked position
    of the block, or with `at_once` all of them.

    Args:
        network: the model.
        params: its weights.
        batch: rows with answers.
        kind: the kind of diffusion model.
        at_once: True fills all positions of a block in one forward pass.
        span: number of tokens of a block, counted from the beginning of the answer; None: the blocks of the model,
            or the whole answer if it has none.
    """
    at = blocks(kind, batch.answer) if span is None else (jnp.cumsum(batch.answer, 1) - 1) // span
    last = at.max() + 1

    def body(_: Array, tokens: Array) -> Array:
        masked = (tokens == kind.mask_token) & batch.answer
        now = masked & (at == jnp.where(masked, at, last).min(1, keepdims=True))
        logits = predict(network, params, tokens, batch.live, kind, answer=batch.answer)
        sure = jnp.where(now, logits.max(-1) - jax.nn.logsumexp(logits, -1), -jnp.inf)
        best = at_once | (sure.argmax(1)[:, None] == jnp.arange(tokens.shape[1]))
        return jnp.where(best & now, logits.argmax(-1), tokens)

    start = jnp.where(batch.answer, kind.mask_token, batch.tokens)
    rounds = last if at_once else batch.answer.sum(1).max()
    return jax.lax.fori_loop(0, rounds, body, start)


@partial(jax.jit, static_argnames=("objective",))
def _row_bounds(objective: Bound, params: Tree, batch: Batch, key: Array) -> Array:
    nats, _, levels, *_ = objective.parts(params, batch, key)
    return (nats / levels).sum(1)


def bound_per_byte(objective: Bound, params: Tree, stream: np.ndarray, byte_lengths: np.ndarray, length: int,
                   batch: int, limit: int | None = None, draws: int = 4) -> float:
    """Estimates the upper bound on bits per byte of a packed stream, with `draws` draws of noise for each window.

    Windows of `length` tokens overlap by half; the second half is scored, given the clean first half. The first half
    window of the stream and the tokens after the last whole window do not count.

    Args:
        objective: the loss.
        params: the weights.
        stream: `i32[N]`.
        byte_lengths: `i32[V]`, the result of `language_model.token_bytes`.
        length: number of tokens of a window.
        batch: number of windows in one call.
        limit: maximum number of windows, spread evenly; None: all.
        draws: number of draws of noise for each window.
    """
    half = length // 2
    starts = np.arange(0, len(stream) - length + 1, half)
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).round().astype(int)]
    nats = total = 0.0
    answer = np.broadcast_to(np.arange(length) >= length - half, (batch, length))
    for at in range(0, len(starts), batch):
        rows = starts[at:at + batch]
        counted = np.arange(batch) < len(rows)
        window = stream[np.resize(rows, batch)[:, None] + np.arange(length)]
        given = Batch(*map(jnp.asarray, (window, answer, np.ones_like(answer))))
        for draw in range(draws):
            key = jax.random.fold_in(jax.random.key(draw), at)
            nats += float((np.asarray(_row_bounds(objective, params, given, key), np.float64) * counted).sum())
        total += float((byte_lengths[window] * (answer & counted[:, None])).sum())
    return nats / draws / math.log(2) / total
