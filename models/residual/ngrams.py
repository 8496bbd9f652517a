"""Embeddings of n-grams of tokens, which are added to the residual streams before a layer (Qwen4; Qwen Team, 2026).

A token has an embedding for each of several tables: of the pair that it ends, of the triple, and so on. A table has a
prime number `p` of rows; with tokens `t_0, t_-1, ...`, the last one first, and large odd numbers `m_i`, the row of an
n-gram is

    (t_0 m_0 xor t_-1 m_1 xor ... ) mod p

An n-gram does not reach before the beginning of a text, nor before the token that ends one: that token takes the place
of what is missing. The embeddings of all tables side by side, `e`, have keys and a value:

    v_k = sigmoid(s(K_k e . X_k / sqrt(D))) V e        X_k <- X_k + v_k + silu(sum over i of w_i v'_k)

for streams `X_k`, with the `v'_k` of the token that is `i n` tokens before. Both sides of the product, and `v'`, are
normed, and `s(z) = sign(z) sqrt(|z|)`.

A node needs the tokens of its nearest ancestors and the `v'` of some farther ones. Both are inputs of a short causal
convolution to the cache (`decodax.cache.recurrence`): a node's own are a part of its entry, and those of the last
tokens of the text are kept for each row, so nothing is written that is not accepted.

JAX has no integers of 64 bits by default. Products have four parts of 16 bits, and remainders are found digit by digit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from decodax.cache import ConvInputs
from decodax.models.config import DecoderConfig
from decodax.models.layers import Linear, weight
from decodax.models.packed import embedded
from decodax.models.residual.gated_connections import StreamNorm
from decodax.models.residual.options import TokenNGrams


def table_rows(rule: TokenNGrams, tokens: Array) -> Array:
    """Returns the rows of the n-grams that end with a token, `i32[..., tables]`, in the table of all of them.

    Args:
        rule: the options.
        tokens: `i32[..., n]`, the tokens of the longest n-gram, the last token first.
    """
    products = _products(tokens.astype(jnp.uint32), rule.multipliers)
    found, mixed = [], products[..., 0, :]
    firsts = np.cumsum((0, *rule.sizes[:-1]))
    for i in range(1, rule.size):
        mixed = mixed ^ products[..., i, :]
        own = slice((i - 1) * rule.heads, i * rule.heads)
        found.append(_remainders(mixed, rule.sizes[own]) + jnp.asarray(firsts[own], jnp.int32))
    return jnp.concatenate(found, -1)


def _products(tokens: Array, factors: tuple[int, ...]) -> Array:
    """Returns the products of tokens, `u32[..., n]`, with one factor each: their parts of 16 bits, `u32[..., n, 4]`,
    the lowest first."""
    few = jnp.uint32(0xFFFF)
    parts = jnp.asarray([[factor >> 16 * j & 0xFFFF for j in range(4)] for factor in factors], jnp.uint32)
    sums = [jnp.zeros(tokens.shape, jnp.uint32)] * 4
    for i, own in enumerate((tokens & few, tokens >> 16)):
        for j in range(4 - i):
            product = own * parts[:, j]
            sums[i + j] = sums[i + j] + (product & few)
            if i + j < 3:
                sums[i + j + 1] = sums[i + j + 1] + (product >> 16)
    for j in range(3):      # at most seven terms of 16 bits, and a carry
        sums[j + 1] = sums[j + 1] + (sums[j] >> 16)
    return jnp.stack(sums, -1) & few


def _remainders(numbers: Array, divisors: tuple[int, ...]) -> Array:
    """Returns the remainders `i32[..., m]` of numbers `u32[..., 4]` (four parts of 16 bits each, the lowest first) by
    `m` divisors below `2 ** 28`."""
    by, found = jnp.asarray(divisors, jnp.uint32), jnp.zeros((), jnp.uint32)
    for part in range(3, -1, -1):
        for shift in (12, 8, 4, 0):
            digit = numbers[..., part, None] >> shift & jnp.uint32(15)
            found = (found * 16 + digit) % by
    return found.astype(jnp.int32)


def own_text(rule: TokenNGrams, tokens: Array, positions: Array) -> Array:
    """Returns the tokens of n-grams, `i32[B, W, n]`, the last token first, in which the token that ends a text takes
    the place of those before it and before the beginning.

    Args:
        rule: the options.
        tokens: `i32[B, W, n]`, each token and those before it, the last one first.
        positions: `i32[B, W]`.
    """
    before = tokens[..., 1:]
    ended = jnp.cumsum((before == rule.stop) | (positions[..., None] < jnp.arange(1, rule.size)), -1) > 0
    return jnp.concatenate([tokens[..., :1], jnp.where(ended, rule.stop, before)], -1)


class NGramInput(nnx.Module):
    """Computes what is added to the residual streams before a layer, from the n-grams of tokens."""

    def __init__(self, c: DecoderConfig, rule: TokenNGrams, rngs: nnx.Rngs):
        self.rule, (n, width) = rule, rule.streams
        norm = lambda: StreamNorm(c.norm, n, width)
        self.table = weight(rngs, (rule.rows, rule.width // rule.tables), ("ngrams", None))
        self.key = Linear(rngs, (rule.width, n * width), (None, None), False)
        self.value = Linear(rngs, (rule.width, width), (None, "embed"), False)
        self.key_norm, self.query_norm, self.conv_norm = norm(), norm(), norm()
        self.conv_taps = weight(rngs, (rule.conv, 1, n * width), (None, None, None))

    def __call__(self, index: int, streams: Array, tables: dict[Any, Any], attend: Any) -> tuple[Array, Any]:
        """Returns what is added to the streams, `f[B, W, n, D]`, and what is to be committed to the cache."""
        return attend(index, None, None, None, walk=NGramWalk(self, tables["inputs"], tables[None], streams))

    def values(self, streams: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns the values of the n-grams for each stream, and their norms, `f[B, W, n, D]` both. `tokens` are
        `i32[B, W, n]`, as `table_rows` takes them."""
        own = embedded(self.table.get_value(), table_rows(self.rule, tokens), streams.dtype)
        own = own.reshape(*own.shape[:2], -1)
        keys = self.key_norm(self.key(own).reshape(streams.shape))
        scores = (keys * self.query_norm(streams)).sum(-1, keepdims=True) / math.sqrt(streams.shape[-1])
        scores = jnp.sqrt(jnp.maximum(jnp.abs(scores), 1e-6)) * jnp.sign(scores)
        values = jax.nn.sigmoid(scores) * self.value(own)[:, :, None]
        return values, self.conv_norm(values)

    def convolved(self, before: list[Array]) -> Array:
        """Returns the convolution of the norms of values at a node and before it, the farthest first, `f[B, W, n, D]`
        each."""
        taps = self.conv_taps[...].astype(jnp.float32).reshape(self.rule.conv, *before[0].shape[2:])
        y = sum((tap * x.astype(jnp.float32) for tap, x in zip(taps, before, strict=True)), jnp.zeros((), jnp.float32))
        return jax.nn.silu(y.astype(before[-1].dtype))


@dataclasses.dataclass(frozen=True)
class NGramWalk:
    """Embeddings of n-grams and the convolution over them; it runs like a `ConvWalk`.

    Attributes:
        part: the weights.
        tokens: `i32[B, W]`.
        positions: `i32[B, W]`.
        streams: `f[B, W, n, D]`, the residual streams before the layer.
    """

    part: NGramInput
    tokens: Array
    positions: Array
    streams: Array

    def run(self, cache: Any, layer: int, window: Any) -> tuple[Array, Any]:
        """Returns what is added to the streams at the nodes of `window`, and what is to be committed to the cache.
        `layer` is the number of the block among those with a state in `cache`."""
        rule = self.part.rule
        # The first call has no values yet, and what it finds of them is not used.
        past, _ = cache.before(layer, (self.tokens, jnp.zeros_like(self.streams)), window)
        values, normed = self._values(jnp.concatenate([past, self.tokens[..., None]], -1)[..., ::-1])
        inputs = self.tokens, normed
        _, far = cache.before(layer, inputs, window, apart=rule.size)
        out = self.part.convolved([*(far[:, :, i] for i in range(rule.conv - 1)), normed])
        return values + out, ConvInputs(inputs=inputs)

    def over_text(self) -> Array:
        """Returns what is added to the streams for all tokens of texts, without a cache."""
        rule, (_, T) = self.part.rule, self.tokens.shape
        padded = jnp.pad(self.tokens, ((0, 0), (rule.size - 1, 0)), constant_values=rule.stop)
        values, normed = self._values(jnp.stack([padded[:, rule.size - 1 - i:][:, :T] for i in range(rule.size)], -1))
        whole = jnp.pad(normed, ((0, 0), (rule.span, 0), (0, 0), (0, 0)))
        return values + self.part.convolved([whole[:, i * rule.size:][:, :T] for i in range(rule.conv)])

    def _values(self, tokens: Array) -> tuple[Array, Array]:
        return self.part.values(self.streams, own_text(self.part.rule, tokens, self.positions))
