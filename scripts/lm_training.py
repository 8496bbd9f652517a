"""The pure part of language-model training: schedule, loss, distillation, one optimizer step, bits per byte, sharding.

`scripts/train_lm.py` is the program around it. Everything here is a function of arrays and frozen dataclasses; the
network is any object with `forward(params, tokens) -> logits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any


class Network(Protocol):
    """What training needs of a network; hashable, so that it is static under jit."""

    def forward(self, params: Tree, tokens: jax.Array) -> jax.Array:
        """tokens i32[B, T] -> logits [B, T, V]."""
        ...


@dataclass(frozen=True)
class Plan:
    """A warm-up, a plateau and a half-cosine to `floor * peak`; `decay_from = warmup` is the usual cosine schedule. One
    that is laid out for `horizon` steps and ends sooner falls to 0 in its last `cooldown` steps.

    A run with a time budget starts with `steps` and `decay_from` open (None): they are settled from the measured speed
    when the decay has to begin, and written down, so that the same two numbers repeat the run.
    """

    peak: float
    warmup: int
    steps: int | None = None
    decay_from: int | None = None
    floor: float = 0.02
    horizon: int | None = None
    cooldown: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of `step` (0-based).

        >>> [round(Plan(1.0, 2, 6, 2, floor=0.0).rate(s), 3) for s in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.steps is None or self.decay_from is None:
            return self.peak * warm
        end = self.horizon or self.steps
        done = min(max((step - self.decay_from) / max(end - self.decay_from, 1), 0.0), 1.0)
        warm *= min(1.0, (self.steps - step) / self.cooldown) if self.cooldown else 1.0
        return self.peak * warm * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@cache
def optimizer(weight_decay: float, clip: float = 1.0) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019) for a unit learning rate: `update` multiplies by the rate of the plan.

    Weight decay leaves vectors (norm scales) alone; gradients are clipped to a global norm of `clip`. The same
    arguments give the same object, so that a second run in a process compiles nothing.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
        optax.add_decayed_weights(weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    )


def cast(params: Tree, dtype: jnp.dtype) -> Tree:
    """Floating leaves in `dtype`; the master copy stays float32: bfloat16 is the precision of the computation only."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p(target) in nats. logits [..., V], targets i32[...] -> f32[...]."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def divergence(teacher: jax.Array, student: jax.Array) -> jax.Array:
    """KL(teacher || student) in nats (Hinton et al., 2015, temperature 1). logits [..., V] twice -> f32[...].

    Temperature 1, because speculative acceptance is a matter of the two distributions as they are sampled from.
    """
    log_p = jax.nn.log_softmax(teacher.astype(jnp.float32))
    log_q = jax.nn.log_softmax(student.astype(jnp.float32))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


@dataclass(frozen=True)
class Objective:
    """The loss of one batch: cross-entropy, or with a teacher `mix * KL + (1 - mix) * cross-entropy`."""

    network: Network
    dtype: str = "float32"
    teacher: Network | None = None
    mix: float = 0.0

    def __call__(self, params: Tree, teacher_params: Tree, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """batch i32[B, T + 1] -> (loss, mean cross-entropy), both f32 scalars in nats."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        dtype = jnp.dtype(self.dtype)
        logits = self.network.forward(cast(params, dtype), inputs)
        truth = cross_entropy(logits, targets).mean()
        if self.teacher is None:
            return truth, truth
        guide = jax.lax.stop_gradient(self.teacher.forward(cast(teacher_params, dtype), inputs))
        return self.mix * divergence(guide, logits).mean() + (1 - self.mix) * truth, truth


@partial(jax.jit, static_argnames=("objective", "tx"), donate_argnames=("params", "opt"))
def update(
    objective: Objective,
    tx: optax.GradientTransformation,
    params: Tree,
    opt: Tree,
    teacher_params: Tree,
    batch: jax.Array,
    rate: jax.Array,
) -> tuple[Tree, Tree, jax.Array, jax.Array]:
    """One step: (params, opt, loss, cross-entropy). `params` and `opt` are donated; `rate` is traced."""
    (loss, truth), grads = jax.value_and_grad(objective, has_aux=True)(params, teacher_params, batch)
    moves, opt = tx.update(grads, opt, params)
    params = jax.tree.map(lambda p, m: p - rate * m, params, moves)
    return params, opt, loss, truth


@partial(jax.jit, static_argnames=("network", "dtype"))
def token_losses(network: Network, params: Tree, batch: jax.Array, dtype: str = "float32") -> jax.Array:
    """-log p of every next token: batch i32[B, T + 1] -> f32[B, T] nats."""
    return cross_entropy(network.forward(cast(params, jnp.dtype(dtype)), batch[:, :-1]), batch[:, 1:])


@partial(jax.jit, static_argnames=("teacher", "student"))
def overlap(teacher: Network, student: Network, teacher_params: Tree, params: Tree, batch: jax.Array) -> jax.Array:
    """sum over x of min(p(x), q(x)) at every position: batch i32[B, T + 1] -> f32[B, T].

    It is the chance that speculative rejection sampling accepts a token that the student drafts for the teacher
    (Leviathan et al., 2023), both at temperature 1.
    """
    p, q = (jax.nn.softmax(n.forward(w, batch[:, :-1])) for n, w in ((teacher, teacher_params), (student, params)))
    return jnp.minimum(p, q).sum(-1)


def token_bytes(tokenizer: Any) -> np.ndarray:
    """i32[V]: how many bytes of text each token of a byte-level tokenizer stands for; 0 for special tokens."""
    special = tokenizer.get_added_tokens_decoder()
    size = tokenizer.get_vocab_size()
    # In the byte-level alphabet each character of a token's name is one byte.
    return np.asarray([0 if i in special else len(tokenizer.id_to_token(i)) for i in range(size)], np.int32)


def bits_per_byte(
    losses: Callable[[np.ndarray], np.ndarray],
    stream: np.ndarray,
    byte_lengths: np.ndarray,
    length: int,
    batch: int,
    limit: int | None = None,
) -> float:
    """Bits per byte of a packed stream: the summed -log2 p of its tokens over the bytes of text they stand for.

    Windows of `length` tokens overlap by half and only the second half counts (in the first window all of it), so
    every token but the first few is predicted from at least `length / 2` tokens before it.

    Args:
        losses: i32[batch, length + 1] -> f32[batch, length], nats; always called with this one shape.
        stream: i32[N], as from `pack`.
        byte_lengths: i32[V], as from `token_bytes`.
        limit: evaluate at most this many windows, spread evenly over the stream; None takes all.
    """
    half = length // 2
    starts = np.arange(0, max(len(stream) - length - 1, 0) + half, half)
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).round().astype(int)]
    nats = total = 0.0
    for at in range(0, len(starts), batch):
        rows = starts[at : at + batch]
        index = rows[:, None] + np.arange(length + 1)
        index = np.concatenate([index, np.zeros((batch - len(rows), length + 1), np.int64)])
        counted = index[:, 1:] < len(stream)
        counted[:, : length - half] &= index[:, :1] == 0
        counted[len(rows) :] = False
        window = stream[np.minimum(index, len(stream) - 1)]
        nats += float((np.asarray(losses(window), np.float64) * counted).sum())
        total += float((byte_lengths[window[:, 1:]] * counted).sum())
    return nats / math.log(2) / total


def make_mesh(model_parallel: int, count: int | None = None) -> Mesh:
    """A (data, model) mesh over the first `count` devices (None: all).

    Raises:
        ValueError: there are fewer devices, or `model_parallel` does not divide their number.
    """
    count = jax.device_count() if count is None else count
    if not 1 <= count <= jax.device_count():
        raise ValueError(f"devices: got {count}; it takes 1 to {jax.device_count()}")
    if model_parallel < 1 or count % model_parallel:
        raise ValueError(f"model_parallel: got {model_parallel}; it takes a divisor of the {count} devices")
    shape, kinds = (count // model_parallel, model_parallel), (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=jax.devices()[:count])


def optimizer_shardings(tx: optax.GradientTransformation, opt: Tree, shardings: Tree, mesh: Mesh) -> Tree:
    """Shardings for the state of `tx`: moments lie as their parameters (`shardings`) do, counters on every device."""
    everywhere = NamedSharding(mesh, P())
    return optax.tree_map_params(tx, lambda _, s: s, opt, shardings, transform_non_params=lambda _: everywhere)


def place_batch(batch: np.ndarray, mesh: Mesh) -> jax.Array:
    """Splits a batch over the `data` axis."""
    return jax.device_put(batch, NamedSharding(mesh, P("data")))
