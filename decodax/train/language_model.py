"""Losses and held-out figures of language models: next tokens, distillation, weighted answers, bits per byte.

Every function is pure. A network is any hashable object with `forward(params, tokens) -> logits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.train.loop import cast

Tree = Any


class Network(Protocol):
    """The part of a model that training uses. It must be hashable, because it is static under `jax.jit`."""

    def forward(self, params: Tree, tokens: Array) -> Array:
        """Returns logits `[B, T, V]` for tokens `i32[B, T]`."""
        ...


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Returns `-log p(target)` in nats, `f32[...]`, from logits `[..., V]` and targets `i32[...]`."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def divergence(teacher: Array, student: Array) -> Array:
    """Returns KL(teacher || student) in nats (Hinton et al., 2015), `f32[...]`, from two arrays of logits `[..., V]`.

    The temperature is 1, because speculative acceptance depends on the two distributions at the temperature of
    sampling.
    """
    log_p = jax.nn.log_softmax(teacher.astype(jnp.float32))
    log_q = jax.nn.log_softmax(student.astype(jnp.float32))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def hardest(losses: Array, reference: Array, keep: float, counted: Array | None = None) -> Array:
    """Returns the positions that a student can still learn, `bool[...]`: the share `keep` of those at which its loss is
    furthest above that of a reference model of its size (AdaSPEC, Hu et al., 2025).

    Args:
        losses, reference: `f32[...]`, the losses of student and reference model.
        keep: the share, above 0 and at most 1.
        counted: `bool[...]`, the positions of which the share is taken; None: all.
    """
    gap = losses - reference
    if counted is None:
        return gap >= jnp.quantile(gap, 1 - keep)
    return counted & (gap >= jnp.nanquantile(jnp.where(counted, gap, jnp.nan), 1 - keep))


def distance(teacher: Array, student: Array, reference: Array | None, keep: float,
             counted: Array | None = None) -> Array:
    """Returns the mean divergence of a student from a teacher, `f32[]`.

    Args:
        teacher, student: their logits, `[..., V]`.
        reference: the logits of a reference model, or None: the mean is then over all positions that count, else over
            the `hardest` ones of these.
        keep: see `hardest`.
        counted: `bool[...]`, the positions that count; None: all.
    """
    each = divergence(teacher, student)
    if reference is not None:
        counted = hardest(jax.lax.stop_gradient(each), divergence(teacher, reference), keep, counted)
    return each.mean() if counted is None else jnp.where(counted, each, 0).sum() / jnp.maximum(counted.sum(), 1)


def share_of(mix: float | None, reference: Network | None) -> float:
    """Returns the weight of the divergence from a teacher in a loss: `mix`, or if that is None the default, 0.7, or 1
    with a reference network. AdaSPEC's loss is the divergence alone, since the cross-entropy also counts the tokens
    that its selection leaves out."""
    return (0.7 if reference is None else 1.0) if mix is None else mix


@dataclass(frozen=True)
class NextTokens:
    """The cross-entropy of every next token; with a teacher, `mix * KL + (1 - mix) * cross-entropy`.

    Attributes:
        network: the trained network.
        dtype: dtype of the computation.
        teacher: the network whose distribution is distilled, or None.
        mix: weight of the divergence from the teacher, 0 to 1; None: see `share_of`.
        reference: a network of the student's size that was distilled before, or None: the divergence then counts only
            where the student can still learn, see `hardest`.
        keep: share of the tokens that counts then.
    """

    network: Network
    dtype: str = "float32"
    teacher: Network | None = None
    mix: float | None = None
    reference: Network | None = None
    keep: float = 0.4

    @property
    def share(self) -> float:
        """Weight of the divergence from the teacher."""
        return share_of(self.mix, self.reference)

    def __call__(self, params: Tree, batch: Array, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats.

        Args:
            params: the weights.
            batch: `i32[B, T + 1]`.
            extra: the weights of the teacher and of the reference network, None for one that is not there.
        """
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = self.network.forward(cast(params, self.dtype), inputs)
        loss = truth = cross_entropy(logits, targets).mean()
        if self.teacher is not None:
            frozen = lambda network, weights: jax.lax.stop_gradient(network.forward(cast(weights, self.dtype), inputs))
            known = None if self.reference is None else frozen(self.reference, extra[1])
            far = distance(frozen(self.teacher, extra[0]), logits, known, self.keep)
            loss = self.share * far + (1 - self.share) * truth
        return loss, {"loss": loss, "cross_entropy": truth}


@dataclass(frozen=True)
class WeightedAnswers:
    """The cross-entropy of next tokens, with weight 1 for tokens of answers and the weight `outside` for other tokens.

    Attributes:
        network: the trained network.
        outside: weight of tokens that do not belong to an answer.
        dtype: dtype of the computation.
    """

    network: Network
    outside: float = 0.02
    dtype: str = "float32"

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: None) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens of answers.
            extra: ignored.
        """
        tokens, answers = batch
        losses = cross_entropy(self.network.forward(cast(params, self.dtype), tokens[:, :-1]), tokens[:, 1:])
        weights = jnp.where(answers[:, 1:], 1.0, self.outside)
        loss = (losses * weights).sum() / weights.sum()
        return loss, {"loss": loss, "answers": (losses * answers[:, 1:]).sum() / answers[:, 1:].sum()}


@partial(jax.jit, static_argnames=("network",))
def token_losses(network: Network, params: Tree, batch: Array) -> Array:
    """Returns `-log p` of every next token in nats, `f32[B, T]`, for a batch `i32[B, T + 1]`."""
    return cross_entropy(network.forward(params, batch[:, :-1]), batch[:, 1:])


@partial(jax.jit, static_argnames=("network",))
def likeliest(network: Network, params: Tree, tokens: Array) -> Array:
    """Returns the most probable next token at each position, `i32[B, T]`, for tokens `i32[B, T]`."""
    return network.forward(params, tokens).argmax(-1)


@partial(jax.jit, static_argnames=("teacher", "student"))
def overlap(teacher: Network, student: Network, teacher_params: Tree, params: Tree, batch: Array) -> Array:
    """Returns the sum of `min(p(x), q(x))` over the vocabulary at every position, `f32[B, T]`, for a batch `i32[B, T +
    1]`.

    It is the probability that speculative sampling accepts a token that the student drafts for the teacher (Leviathan
    et al., 2023), both at temperature 1.
    """
    p, q = (jax.nn.softmax(n.forward(w, batch[:, :-1])) for n, w in ((teacher, teacher_params), (student, params)))
    return jnp.minimum(p, q).sum(-1)


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Returns `i32[V]`, the number of bytes of text that each token of a byte-level tokenizer has; 0 for special
    tokens."""
    special = tokenizer.get_added_tokens_decoder()
    size = tokenizer.get_vocab_size()
    # In the byte-level alphabet each character of a token's name is one byte.
    return np.asarray([0 if i in special else len(tokenizer.id_to_token(i)) for i in range(size)], np.int32)


def bits_per_byte(losses: Callable[[np.ndarray], np.ndarray], stream: np.ndarray, byte_lengths: np.ndarray, length: int,
                  batch: int, limit: int | None = None) -> float:
    """Returns the summed -log2 p of the tokens of a packed stream, divided by the bytes of their text.

    Windows of `length` tokens overlap by half and only the second half counts (in the first window all of it), so every
    token but the first few is predicted from at least `length / 2` tokens before it.

    Args:
        losses: `i32[batch, length + 1]` -> `f32[batch, length]`, nats; always called with this one shape.
        stream: `i32[N]`, as from `corpus.pack`.
        byte_lengths: `i32[V]`, as from `token_bytes`.
        length: the number of tokens of a window.
        batch: the number of windows in one call of `losses`.
        limit: the maximum number of windows, spread evenly over the stream; None takes all.
    """
    half = length // 2
    starts = np.arange(0, max(len(stream) - length - 1, 0) + half, half)
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).round().astype(int)]
    nats = total = 0.0
    for at in range(0, len(starts), batch):
        rows = starts[at:at + batch]
        index = rows[:, None] + np.arange(length + 1)
        index = np.concatenate([index, np.zeros((batch - len(rows), length + 1), np.int64)])
        counted = index[:, 1:] < len(stream)
        counted[:, :length - half] &= index[:, :1] == 0
        counted[len(rows):] = False
        window = stream[np.minimum(index, len(stream) - 1)]
        nats += float((np.asarray(losses(window), np.float64) * counted).sum())
        total += float((byte_lengths[window[:, 1:]] * counted).sum())
    return nats / math.log(2) / total
