"""Pooled keys of groups of tokens (DeepSeek V4; DeepSeek-AI, 2026).

A token has for each channel a value `c` and a score `z`. The group of the positions `w m .. w m + m - 1` has the key

    sum over its tokens t of softmax_t(z_t + b_t) c_t

separately for each channel, where `b` is learned for each place in a group; in Qwen4 it is the plain mean. With
`overlap` tokens have two values and two scores, one for their own group and one for the next: the mean is over the
`2 m` tokens of a group and of the one before it.

A group's key is a function of the tokens on the path to its last one. So it is made when that token is a node, from the
node's ancestors in the window and the last tokens of the text, and is stored as a part of that node's entry: other
nodes that end the same group in other branches of a tree have keys of their own, and what is not accepted is never
written. Only the projections of the last `m - 1`, or `2 m - 1`, tokens of the text are kept for that.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.cache import ConvInputs
from decodax.common.axes import DATA, shardwise
from decodax.core.window import take
from decodax.models.compressed.options import Pooling

TOKENS = 512
"""Number of tokens whose projections are gathered at a time. It bounds the memory of a row: for the 1,024 projections
of a token in layers with groups of 128, 2 MB in float32."""

OUTSIDE = -1e30
"""Score of positions before a text."""


@dataclasses.dataclass(frozen=True)
class PoolWalk:
    """Makes the pooled keys of the nodes that end a group; it runs like a `ConvWalk`.

    Attributes:
        rule: options of the pooled keys.
        x: projections of the nodes, an array `f[B, W, C]` in a tuple, in the order of `Pooling.inputs`.
        bias: what is added to the scores, `f[m, C / 2]`, in the order of the scores among the projections.
        positions: `i32[B, W]`, positions of the nodes.
    """

    rule: Pooling
    x: tuple[Array]
    bias: Array
    positions: Array

    def run(self, cache: Any, layer: int, window: Any) -> tuple[Array, Any]:
        """Returns `f[B, W, Pooling.made]`, at nodes that end a group the keys of that group and else zeros, and what is
        to be committed to the cache. `layer` is the number of the block among those with a state in `cache`."""
        (x,), where, seen = cache.history(layer, self.x, window)
        return self._means(x, where, seen, None), ConvInputs(inputs=self.x)

    def over_text(self) -> Array:
        """Returns the same for all tokens of texts, whose positions follow one another, without a cache."""
        B, T = self.positions.shape
        return self._means(self.x[0], self.positions, jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T)),
                           -(-T // self.rule.every))

    def _means(self, x: Array, where: Array, seen: Array, most: int | None) -> Array:
        """Returns the keys that `run` describes. Tokens have projections `x`, `f[B, K, C]`, and positions `where`,
        `i32[B, K]`; nodes see those in `seen`, `bool[B, W, K]`. `most`: the maximum number of nodes of a row that end a
        group, with which the loop can be differentiated; None: not known."""
        # Each device computes its own rows, as long as these need: a collective in the loop would wait for others.
        rows, rule = P(DATA), self.rule
        return shardwise(lambda *given: _means(rule, most, *given), (rows, rows, rows, rows, P()), rows, x, where, seen,
                         self.positions, self.bias, whole=True)


def _means(rule: Pooling, most: int | None, x: Array, where: Array, seen: Array, positions: Array, bias: Array
           ) -> Array:
    B, W = positions.shape
    ends = (positions >= 0) & ((positions + 1) % rule.every == 0)
    size = max(1, min(W if most is None else most, TOKENS // rule.conv))
    order = jnp.pad(jnp.argsort(~ends, axis=1, stable=True), ((0, 0), (0, size)), constant_values=W)
    row = jnp.arange(B)[:, None]

    def some(i: Array, made: Array) -> Array:
        nodes = lax.dynamic_slice_in_dim(order, i * size, size, 1)
        own = jnp.minimum(nodes, W - 1)
        at = take(positions, own)[..., None] + jnp.arange(1 - rule.conv, 1, dtype=jnp.int32)
        here = take(seen, own)[:, :, None] & (where[:, None, None] == at[..., None])        # [B, size, conv, K]
        means = pooled(rule, take(x, jnp.argmax(here, -1)), here.any(-1) & (at >= 0), bias)
        return made.at[row, nodes].set(jnp.where(take(ends, own)[..., None], means, 0), mode="drop")

    made = jnp.zeros((B, W, rule.made), x.dtype)
    rounds = (ends.sum(1).max() + size - 1) // size if most is None else -(-most // size)
    return lax.fori_loop(0, rounds, some, made)


def pooled(rule: Pooling, x: Array, known: Array, bias: Array) -> Array:
    """Returns the keys of groups, `f[..., Pooling.made]`.

    Args:
        rule: options of the pooled keys.
        x: projections of the tokens of each group, and with `overlap` of the one before it, `f[..., conv, C]`.
        known: `bool[..., conv]`, True for tokens of the text; False for positions before it.
        bias: see `PoolWalk`.
    """
    if not rule.scored:
        return x.astype(jnp.float32).mean(-2).astype(x.dtype)
    m, parts = rule.every, jnp.split(x, list(itertools.accumulate(rule.inputs))[:-1], -1)
    biases = jnp.split(bias.astype(jnp.float32), list(itertools.accumulate(rule.inputs[1::2]))[:-1], -1)

    def mean(values: Array, scores: Array, bias: Array) -> Array:
        bias = jnp.tile(bias, (rule.conv // m, 1))
        if rule.overlap:
            # The first half of the channels is for the next group.
            d = values.shape[-1] // 2
            values, scores, bias = (jnp.concatenate([y[..., :m, :d], y[..., m:, d:]], -2)
                                    for y in (values, scores, bias))
        scores = jnp.where(known[..., None], scores.astype(jnp.float32) + bias, OUTSIDE)
        return (values * jax.nn.softmax(scores, -2).astype(values.dtype)).sum(-2)

    return jnp.concatenate([mean(parts[2 * i], parts[2 * i + 1], own) for i, own in enumerate(biases)], -1)
