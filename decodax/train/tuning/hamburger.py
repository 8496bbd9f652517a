"""The tuning of HAMburger ("HAMburger: Accelerating LLM Inference via Token Smashing", Liu and Zhu, 2025): a model
learns to read and to write groups of tokens, together with the embedder that merges a group and the decoder that writes
one.

Groups are chosen by the entropies that the model has before the training: a group begins with the token of which it is
least sure. As in the authors' code, the model has half the learning rate of embedder and decoder (`RATES`), and the
model before the training may be a teacher (`HamburgerLoss.distill`): it reads the text token by token, and the model in
training learns its distribution of each token. For the ends of groups there is no such loss, since the teacher does not
predict them. The authors' code has a place for each end among the teacher's logits, but never uses this loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from decodax.algorithms.parallel.hamburger import EntryPositions
from decodax.core.types import embeddings
from decodax.core.window import Window, causal, take
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.examples import ExampleRows
from decodax.train.tuning.exits import learned_mean

Tree = Any

RATES = 0.5, 1.0
"""Factors of the learning rate of the model, and of embedder and decoder."""

WHOLE = 32
"""Groups of a batch are padded to multiples of this number, so that few programs are compiled."""

Groups = tuple[Array, Array, Array]
"""Tokens `i32[B, G, K]` of the groups of each text, the number of them in each group, `i32[B, G]`, 0 after the end of a
text, and `bool[B, G]`, True for groups that are learned."""


@dataclass(frozen=True)
class HamburgerLoss:
    """HAMburger's loss, an `Objective`: the mean cross-entropy of tokens, and `stop_weight` times that of the ends of
    groups. The weights are a pair, those of the model and those of the head.

    Attributes:
        network: the model's network.
        head: embedder and decoder.
        stop_weight: weight of the ends of groups.
        distill: weight of the divergence KL(teacher || model) of each learned token; 0: there is no teacher.
        dtype: dtype of the computation.
    """

    network: Any
    head: HamburgerHead
    stop_weight: float = 0.5
    distill: float = 0.0
    dtype: str = "float32"

    def outputs(self, params: tuple[Tree, Tree], groups: Groups) -> tuple[Array, Array]:
        """Returns for each of `G - 1` groups, all but the first, the logits `f32[B, G - 1, K, V]` of its up to `K`
        tokens, and the logits `f32[B, G - 1, K]` that it ends after each of them. `params` are the weights of model and
        head."""
        (tokens, count, _), (own, weights) = groups, params
        B, G, K = tokens.shape
        embedded = embeddings(self.network, own, tokens)
        some = jnp.maximum(count, 1)
        place = jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32), count.shape)
        window = Window(tokens=take(tokens.reshape(B * G, K), some.reshape(-1) - 1).reshape(B, G),
                        positions=jnp.cumsum(count, 1) - 1, mask=jnp.tril(jnp.ones((1, G, G), bool)), live=count > 0,
                        embeddings=self.head.merge(weights, embedded, some), embedded=count > 0)
        places: Any = EntryPositions(self.network.init_cache(B, 0), place)
        out = self.network.apply(own, window, places)
        features = self.head.features(out.hidden, out.layers)[:, :-1].reshape(B * (G - 1), self.head.read, -1)
        hidden = features[:, -1:]
        if K > 1:
            x = jnp.concatenate([features, embedded[:, 1:, :-1].reshape(B * (G - 1), K - 1, -1)], 1)
            nodes = causal(jnp.zeros(x.shape[:2], jnp.int32), jnp.zeros(len(x), jnp.int32))
            cache: Any = self.head.init_cache(len(x), 0, x.dtype)
            made = self.head.step(weights, nodes.tokens, lambda tokens: tokens, x, nodes.positions, 0,
                                  lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, nodes, **options))
            hidden = jnp.concatenate([hidden, made.hidden[:, self.head.read:]], 1)
        hidden = hidden.reshape(B, G - 1, K, -1)
        return out.head(hidden), self.head.stop(weights, hidden)

    def teacher(self, weights: Tree, groups: Groups) -> Array:
        """Returns the logits `f32[B, G - 1, K, V]` with which a model of the same network, with the given weights,
        predicts each token of all groups but the first, from the text before it, read token by token."""
        tokens, count, _ = groups
        B, G, K = tokens.shape
        inside = jnp.arange(K) < count[..., None]
        at = (jnp.cumsum(count, 1) - count)[..., None] + jnp.arange(K, dtype=jnp.int32)
        rows = jnp.arange(B)[:, None, None]
        text = jnp.zeros((B, G * K), jnp.int32).at[rows, jnp.where(inside, at, G * K)].set(tokens, mode="drop")
        logits = self.network.forward(weights, text)
        return logits[rows, jnp.maximum(at[:, 1:] - 1, 0)].astype(jnp.float32)

    def __call__(self, params: tuple[Tree, Tree], batch: Groups, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", those of tokens and of ends, and with `distill` the
        divergence from the teacher, "kl".

        Args:
            params: the weights of the model and of the head.
            batch: the groups.
            extra: the weights of the teacher; ignored without `distill`.
        """
        tokens, count, learned = (x[:, 1:] for x in batch)
        logits, stops = self.outputs(cast(params, self.dtype), batch)
        place = jnp.arange(tokens.shape[2])
        counted = (place < count[..., None]) & learned[..., None]
        words = learned_mean(cross_entropy(logits, tokens), counted)
        ends = learned_mean(optax.sigmoid_binary_cross_entropy(stops, place == count[..., None] - 1), counted)
        loss, scalars = words + self.stop_weight * ends, {"cross_entropy": words, "stop": ends}
        if self.distill:
            known = jax.lax.stop_gradient(jax.nn.log_softmax(self.teacher(cast(extra, self.dtype), batch)))
            apart = (jnp.exp(known) * (known - jax.nn.log_softmax(logits.astype(jnp.float32)))).sum(-1)
            scalars["kl"] = learned_mean(apart, counted)
            loss = loss + self.distill * scalars["kl"]
        return loss, {"loss": loss, **scalars}


@partial(jax.jit, static_argnames=("network",))
def _entropies(network: Any, params: Tree, tokens: Array) -> Array:
    logs = jax.nn.log_softmax(network.forward(params, tokens[:, :-1]).astype(jnp.float32))
    return -(jnp.exp(logs) * logs).sum(-1)


def group_starts(entropies: np.ndarray, learned: np.ndarray, steps: int, least: float = 0.05,
                 ratio: float = 0.3) -> np.ndarray:
    """Returns the tokens that begin a group, `bool[N, T]`. Tokens that are not learned are groups of their own.

    A token joins the group before it if that has fewer than `steps` tokens, and if the model's entropy for it is below
    `least`, or below `ratio` times the largest in the group ("decreasing_v2" in the authors' code, and its numbers).

    Args:
        entropies: `f[N, T]`, entropy of the model's distribution of each token, in nats.
        learned: `bool[N, T]`.
        steps: largest number of tokens of a group.
        least: entropy below which a token joins any group.
        ratio: share of the largest entropy.

    >>> group_starts(np.array([[0, 2.0, 0.5, 0.7, 0.01, 0.01, 1.0]]), np.arange(7)[None] > 0, 4)[0].tolist()
    [True, True, False, True, False, False, True]
    """
    starts, size, most = np.ones(learned.shape, bool), np.zeros(len(learned), int), np.full(len(learned), -1.0)
    for at in range(learned.shape[1]):
        now = entropies[:, at]
        joins = learned[:, at] & (size > 0) & (size < steps) & ((now < least) | (now < ratio * most))
        starts[:, at] = ~joins
        size = np.where(learned[:, at], np.where(joins, size + 1, 1), 0)
        most = np.where(joins, np.maximum(most, now), now)
    return starts


def grouped(lm: Any, rows: ExampleRows, steps: int, size: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns examples as `Groups`, by the entropies of the model.

    Args:
        lm: a result of `decodax.load`.
        rows: `N` examples.
        steps: largest number of tokens of a group.
        size: number of rows of a forward pass.
    """
    entropies = np.zeros(rows.tokens.shape)
    for at in range(0, len(rows), size):
        some = rows.tokens[at:at + size]
        found = _entropies(lm.model, lm.params, jnp.asarray(np.resize(some, (size, some.shape[1]))))
        entropies[at:at + size, 1:] = np.asarray(found)[:len(some)]
    starts = group_starts(entropies, rows.learned, steps)
    # a row ends with its last learned token
    inside = np.maximum.accumulate(rows.learned[:, ::-1], 1)[:, ::-1]
    number = np.cumsum(starts, 1) - 1
    index = np.arange(starts.shape[1])
    place = index - np.maximum.accumulate(np.where(starts, index, 0), 1)
    many = -(-(1 + int(number[inside].max())) // WHOLE) * WHOLE
    tokens, count = np.zeros((len(rows), many, steps), np.int32), np.zeros((len(rows), many), np.int32)
    learned = np.zeros((len(rows), many), bool)
    row, column = np.nonzero(inside)
    group = number[row, column]
    tokens[row, group, place[row, column]] = rows.tokens[row, column]
    np.add.at(count, (row, group), 1)
    learned[row, group] = rows.learned[row, column]
    return tokens, count, learned


__all__ = ["RATES", "Groups", "HamburgerLoss", "group_starts", "grouped"]
