"""The pure part of training masked diffusion models: noise, losses, one optimizer step, greedy filling.

Three losses; the first two are upper bounds on the negative log-likelihood:

- *masked diffusion* (LLaDA, Nie et al. 2025): the whole sequence sees itself; a noise level `t ~ U(0, 1)` a row, each
  answer token is masked with probability `t`, cross-entropy at the masked ones, weighted by `1 / t`;
- *block diffusion* (BD3-LM, Arriola et al. 2025; SDAR, Cheng et al. 2025): a noise level a block; a noisy block sees
  itself and the clean blocks before it. One forward serves all blocks: the noisy text and the clean text, one behind
  the other, under a mask that lets each noisy block see the right clean ones;
- *set block decoding* (Gat et al. 2025): as block diffusion, but the clean text is causal, and it also learns to
  predict its next tokens. Blocks are counted from the beginning of the answer, as the sampler counts them.

Noise levels are stratified over the batch (the low-discrepancy sampler of MDLM, Sahoo et al. 2024): row `i` of `B`
draws from `[i/B, (i+1)/B)`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from lm_training import cast, cross_entropy
from optax import contrib

from decodax.common.struct import Struct, struct
from decodax.models import DecoderConfig, Diffusion, Transformer

Tree = Any

LEAST = 1e-3
"""The lowest noise level, as LLaDA's and MDLM's code has it; it bounds the weight `1 / t`."""


@struct
class Batch(Struct):
    """Clean sequences.

    Attributes:
        tokens: `i32[B, T]`. answer: `bool[B, T]`, what is masked and learned; the rest is a prompt, always clean.
        live: `bool[B, T]`, what is part of the sequence; it begins at position 0 and has no holes.
    """

    tokens: Array
    answer: Array
    live: Array


@cache
def muon(weight_decay: float, clip: float = 1.0) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for kernels, Adam for embeddings and norms, at a unit learning rate.

    A kernel moves by its momentum, orthogonalised; the factor `0.2 sqrt(max(in, out))` gives that the size of AdamW's
    moves (Liu et al. 2025), so that both go with one learning rate. The rest as `lm_training.optimizer`.
    """
    plain = lambda tree: jax.tree.map(lambda x: contrib.MuonDimensionNumbers(0, 1), tree)
    size = optax.stateless(lambda tree, _: jax.tree.map(lambda x: 0.2 * max(x.shape) ** 0.5 * x, tree))
    kinds = lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, x: "kernel" if getattr(path[-1], "key", None) == "kernel" else "rest", tree)
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition({"kernel": optax.chain(contrib.scale_by_muon(weight_dimension_numbers=plain), size),
                         "rest": optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9)}, kinds),
        optax.add_decayed_weights(weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    )


def widened(params: Tree, spread: float) -> Tree:
    """Fresh weights with the standard deviation of their kernels multiplied."""
    by = lambda path, x: x * spread if getattr(path[-1], "key", None) == "kernel" else x
    return jax.tree_util.tree_map_with_path(by, params)


def check(kind: Diffusion) -> None:
    """Whether a kind can be trained here.

    Raises:
        ValueError: it cannot.
    """
    if kind.attention == "causal":
        raise ValueError("attention: got causal, takes full, block-causal or causal-prefix")
    if kind.attention != "full" and kind.shift:
        raise ValueError("shift: got True with blocks, takes False: the token before a block does not see it")


def with_vocab(config: DecoderConfig, vocab: int) -> DecoderConfig:
    """The same shape with another vocabulary."""
    return dataclasses.replace(config, vocab=vocab)


def blocks(kind: Diffusion, answer: Array) -> Array:
    """`i32[B, T]`: the number of the block that a position lies in; 0 everywhere without blocks. They are counted from
    the first token, or after a causal prefix from the first one of the answer (`bool[B, T]`), before which numbers are
    negative.

    >>> blocks(Diffusion(9, attention="causal-prefix", block=2), jnp.arange(6)[None] > 2).tolist()
    [[-2, -1, -1, 0, 0, 1]]
    """
    place = jnp.broadcast_to(jnp.arange(answer.shape[1]), answer.shape)
    if kind.block is None:
        return jnp.zeros_like(place)
    start = answer.argmax(1)[:, None] if kind.attention == "causal-prefix" else 0
    return (place - start) // kind.block


def visible(live: Array, at: Array, front: Array | None = None) -> Array:
    """`bool[B, T, T]`, who sees whom at decoding time: what is live and not in a later block.

    Args:
        live: `bool[B, T]`. at: `i32[B, T]`, the blocks' numbers.
        front: `i32[B]`: what stands before it is causal; None: nothing.

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
    """`bool[B, 2T, 2T]` for the noisy text and the clean text behind it: a noisy block sees itself and earlier clean
    blocks; a clean block sees itself, or with `causal` what stands before each token, and earlier clean ones; nothing
    clean sees anything noisy. `at`: as in `visible`."""
    T = live.shape[1]
    same, before = at[:, None, :] == at[:, :, None], at[:, None, :] < at[:, :, None]
    clean = jnp.broadcast_to(jnp.tri(T, dtype=bool), same.shape) if causal else same | before
    mask = jnp.concatenate([jnp.concatenate([same, before], 2),
                            jnp.concatenate([jnp.zeros_like(same), clean], 2)], 1)
    return (mask & jnp.tile(live, (1, 2))[:, None, :]) | jnp.eye(2 * T, dtype=bool)


def noise_levels(key: Array, rows: int, blocks: int = 1) -> Array:
    """`f32[B, blocks]` in `(LEAST, 1]`, stratified over the rows; each block's strata are rotated by its own amount."""
    start = jax.random.uniform(key, (1, blocks))
    strata = (jnp.arange(rows)[:, None] / rows + start) % 1.0
    return LEAST + (1 - LEAST) * strata


def corrupt(key: Array, batch: Batch, kind: Diffusion) -> tuple[Array, Array, Array]:
    """Noise for a batch.

    Returns:
        The noisy tokens `i32[B, T]`, which of them are masked `bool[B, T]`, and the noise level at each `f32[B, T]`.
    """
    B, T = batch.tokens.shape
    size = T if kind.block is None else kind.block
    keys = jax.random.split(key)
    count = -(-T // size)
    levels = jnp.take_along_axis(noise_levels(keys[0], B, count), blocks(kind, batch.answer) % count, 1)
    masked = (jax.random.uniform(keys[1], (B, T)) < levels) & batch.answer
    return jnp.where(masked, kind.mask, batch.tokens), masked, levels


def apart(mask: Array, answer: Array, rows: Array) -> Array:
    """`bool[B, T, T]`: the mask, with the prompt of such rows (`bool[B]`) blind to their answer (`bool[B, T]`)."""
    return mask & ~(rows[:, None, None] & ~answer[:, :, None] & answer[:, None, :])


def predict(network: Transformer, params: Tree, tokens: Array, live: Array, kind: Diffusion,
            clean: Array | None = None, blind: tuple[Array, Array] | None = None,
            answer: Array | None = None) -> Array:
    """Logits `f32[B, T, V]` aligned with the tokens they are for, the mask's own removed.

    Args:
        tokens: `i32[B, T]`, noisy. clean: the same without noise, for the blocks of a training step; None: blocks see
            what `tokens` holds, as at decoding time. blind: the answers and the rows of `apart`, without blocks.
        answer: `bool[B, T]`, from whose beginning blocks are counted after a causal prefix; None: all of the text.
    """
    if clean is not None and kind.block is not None:
        return predict_twice(network, params, tokens, live, kind, clean, answer)[0]
    at = blocks(kind, jnp.ones_like(live) if answer is None else answer)
    mask = visible(live, at, front(tokens, at, kind) if kind.attention == "causal-prefix" else None)
    logits = network.forward(params, tokens, mask=mask if blind is None else apart(mask, *blind))
    if kind.shift:
        logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], 1)
    return logits.at[..., kind.mask].set(-jnp.inf)


def front(tokens: Array, at: Array, kind: Diffusion) -> Array:
    """`i32[B]`: where the first block with a mask begins; the text's end where there is none."""
    last = at.max() + 1
    current = jnp.where(tokens == kind.mask, at, last).min(1, keepdims=True)
    return jnp.where(current == last, at.shape[1], (at >= current).argmax(1, keepdims=True))[:, 0]


def predict_twice(network: Transformer, params: Tree, tokens: Array, live: Array, kind: Diffusion, clean: Array,
                  answer: Array | None = None) -> tuple[Array, Array]:
    """As `predict` for the blocks of a training step, and the logits `f32[B, T, V]` of the clean text."""
    T = tokens.shape[1]
    where = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
    at = blocks(kind, jnp.ones_like(live) if answer is None else answer)
    hidden, head = network.features(params, jnp.concatenate([tokens, clean], 1), jnp.concatenate([where, where], 1),
                                    visible_twice(live, at, kind.attention == "causal-prefix"))
    noisy, plain = (head(x).at[..., kind.mask].set(-jnp.inf) for x in (hidden[:, :T], hidden[:, T:]))
    return noisy, plain


@dataclass(frozen=True)
class Bound:
    """The loss of masked or block diffusion: each row's sum of cross-entropies over `t`, per answer token; the mean
    over rows (LLaDA's loss of supervised fine-tuning; with blocks, of BD3-LM). After a causal prefix the clean text's
    cross-entropy of next tokens is added, with equal weight, as for set block decoding.

    Attributes:
        apart: the share of rows whose prompt does not see the answer. A small model that keeps its books in the prompt
            breaks when the prompt comes from a cache; one that has seen such rows does without.
    """

    network: Transformer
    kind: Diffusion
    dtype: str = "float32"
    apart: float = 0.0

    def __call__(self, params: Tree, batch: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        """The loss in nats, an upper bound, and to watch: plain cross-entropy and accuracy at the masked tokens."""
        nats, masked, levels, right, following = self.parts(params, batch, key)
        each = lambda x: (x.sum(1) / jnp.maximum(batch.answer.sum(1), 1)).mean()
        loss = each(nats / levels)
        if self.kind.attention == "causal-prefix":
            loss += each(following)
        count = jnp.maximum(masked.sum(), 1)
        return loss, {"loss": loss, "cross_entropy": nats.sum() / count, "accuracy": right.sum() / count}

    def parts(self, params: Tree, batch: Batch, key: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Of every position `[B, T]`: nats (0 where not masked), masked, noise level, masked and predicted right, and
        nats of the clean text's prediction of this token of the answer, 0 but after a causal prefix."""
        noisy, masked, levels = corrupt(key, batch, self.kind)
        blind = None
        if self.apart:
            rows = jax.random.uniform(jax.random.fold_in(key, 2), noisy.shape[:1]) < self.apart
            blind = batch.answer, rows
        params, following = cast(params, jnp.dtype(self.dtype)), jnp.zeros(noisy.shape)
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
    """dParallel's distillation (Chen et al. 2025): a model learns to be sure, all at once, of what it wrote itself.

    The answers are the model's own. Of each row's answer one block is drawn: what stands before it is clean, what
    stands behind it is masked, and inside it each token is masked with probability `ratio`. The loss is cross-entropy
    at the block's masked tokens, and `weight` times the entropy, at `temperature`, of those of them that are predicted
    right. The complement of the masked tokens is learned in the same step, as in the authors' code.

    Attributes:
        span: tokens of such a block, counted from the beginning of the answer.
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
            logits = predict(self.network, cast(params, jnp.dtype(self.dtype)), noisy, batch.live, self.kind,
                             answer=batch.answer)
            figures.append(self.terms(logits, batch.tokens, masked))
            loss += figures[-1]["cross_entropy"] + self.weight * figures[-1]["entropy"]
        return loss, {"loss": loss, **{k: (a + figures[1][k]) / 2 for k, a in figures[0].items()}}

    def noise(self, key: Array, batch: Batch) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """For the draw and its complement: which tokens of the block are masked, and the noisy text."""
        keys = jax.random.split(key)
        block = jnp.where(batch.answer, (jnp.cumsum(batch.answer, 1) - 1) // self.span, -1)
        count = block.max(1) + 1
        active = (jax.random.uniform(keys[0], count.shape) * count).astype(jnp.int32)[:, None]
        here, later = batch.answer & (block == active), batch.answer & (block > active)
        drawn = jax.random.uniform(keys[1], batch.tokens.shape) < self.ratio
        each = lambda masked: (masked, jnp.where(masked | later, self.kind.mask, batch.tokens))
        return each(here & drawn), each(here & ~drawn)

    def terms(self, logits: Array, tokens: Array, masked: Array) -> dict[str, Array]:
        """Mean cross-entropy of the masked tokens, mean entropy of those that are right, and their share."""
        nats = jnp.where(masked, cross_entropy(logits, jnp.where(masked, tokens, 0)), 0.0)
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32) / self.temperature)
        entropy = -jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * jnp.where(jnp.isfinite(log_p), log_p, 0.0), 0.0)
        right = masked & (logits.argmax(-1) == tokens)
        count, sure = jnp.maximum(masked.sum(), 1), jnp.maximum(right.sum(), 1)
        return {"cross_entropy": nats.sum() / count, "entropy": jnp.where(right, entropy.sum(-1), 0.0).sum() / sure,
                "accuracy": right.sum() / count}


@partial(jax.jit, static_argnames=("objective", "tx"), donate_argnames=("params", "opt"))
def update(objective: Any, tx: optax.GradientTransformation, params: Tree, opt: Tree, batch: Any, key: Array,
           step: Array, rate: Array) -> tuple[Tree, Tree, dict[str, Array]]:
    """One step of any `objective(params, batch, key) -> (loss, figures)`: (params, opt, figures).

    `params` and `opt` are donated. The step's randomness is `key` folded with `step`, so a resumed run draws the same.
    """
    (_, figures), grads = jax.value_and_grad(objective, has_aux=True)(params, batch, jax.random.fold_in(key, step))
    moves, opt = tx.update(grads, opt, params)
    return jax.tree.map(lambda p, m: p - rate * m, params, moves), opt, figures


@partial(jax.jit, static_argnames=("network", "kind", "at_once"))
def fill(network: Transformer, params: Tree, batch: Batch, kind: Diffusion, at_once: bool = False) -> Array:
    """`i32[B, T]`: the answers filled greedily, block by block: the most confident token a forward, or all of them."""
    at = blocks(kind, batch.answer)
    last = at.max() + 1

    def body(_: Array, tokens: Array) -> Array:
        masked = (tokens == kind.mask) & batch.answer
        now = masked & (at == jnp.where(masked, at, last).min(1, keepdims=True))
        logits = predict(network, params, tokens, batch.live, kind, answer=batch.answer)
        sure = jnp.where(now, logits.max(-1) - jax.nn.logsumexp(logits, -1), -jnp.inf)
        best = at_once | (sure.argmax(1)[:, None] == jnp.arange(tokens.shape[1]))
        return jnp.where(best & now, logits.argmax(-1), tokens)

    start = jnp.where(batch.answer, kind.mask, batch.tokens)
    rounds = last if at_once else batch.answer.sum(1).max()
    return jax.lax.fori_loop(0, rounds, body, start)


@partial(jax.jit, static_argnames=("objective",))
def _row_bounds(objective: Bound, params: Tree, batch: Batch, key: Array) -> Array:
    nats, _, levels, *_ = objective.parts(params, batch, key)
    return (nats / levels).sum(1)


def bound_per_byte(objective: Bound, params: Tree, stream: np.ndarray, byte_lengths: np.ndarray, length: int,
                   batch: int, limit: int | None = None, draws: int = 4) -> float:
    """An estimate of the bound on bits per byte of a packed stream, from `draws` noises a window.

    Windows of `length` tokens overlap by half; the second half is scored, given the first half clean. The first half
    window of the stream and what is left behind the last whole window do not count.

    Args:
        stream: `i32[N]`. byte_lengths: `i32[V]`, as from `lm_training.token_bytes`.
        limit: at most this many windows, spread evenly; None: all.
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
        given = Batch(window, answer, np.ones_like(answer))
        for draw in range(draws):
            key = jax.random.fold_in(jax.random.key(draw), at)
            nats += float((np.asarray(_row_bounds(objective, params, given, key), np.float64) * counted).sum())
        total += float((byte_lengths[window] * (answer & counted[:, None])).sum())
    return nats / draws / math.log(2) / total
