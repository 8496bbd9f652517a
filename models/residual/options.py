"""Options of the parts of a decoder that change the residual stream beside attention and MLP."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from decodax.common.arguments import check_counts


@dataclasses.dataclass(frozen=True)
class Streams:
    """Options of several residual streams. See `decodax.models.residual.streams`.

    Attributes:
        count: number of streams `n`.
        active: index of the stream that goes through attention and MLP.
        scaled: True multiplies the active stream by a learned scale before a layer's input is taken from it.
        rank: number of inner channels of a learned path beside attention.
    """

    count: int
    active: int = 0
    scaled: bool = True
    rank: int = 64

    def __post_init__(self) -> None:
        if self.count < 2 or not 0 <= self.active < self.count or self.rank < 1:
            raise ValueError(f"count: got {self.count} streams with the active one {self.active} and a path of rank "
                             f"{self.rank}, takes 2 or more, one of them, and 1 or more")


@dataclasses.dataclass(frozen=True)
class HyperConnections:
    """Options of residual streams that all go through each layer. See `decodax.models.residual.hyper_connections`.

    Attributes:
        count: number of streams `n`.
        iterations: number of Sinkhorn steps, each of which divides the columns of a mixture by their sums, all but the
            first after the rows. None: no mixture, each stream stays itself.
        eps: added to shares and sums.
        norm_eps: added to the mean square of all streams, by whose root they are divided before shares are computed.
        magnitude: upper bound of the shares of a half's output that are added to streams, without `eps`.
        joined: the streams after the last layer are added with learned shares ("shares"), or their mean is taken
            ("mean", GLM-5.3 Flash).
    """

    count: int
    iterations: int | None = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    magnitude: float = 2.0
    joined: Literal["shares", "mean"] = "shares"

    def __post_init__(self) -> None:
        check_counts(self, "count", "iterations")


@dataclasses.dataclass(frozen=True)
class GatedConnections:
    """Options of residual streams with a gate for each channel (Qwen4). See
    `decodax.models.residual.gated_connections`.

    Attributes:
        count: number of streams `n`.
        rank: number of channels between the two matrices that the gates are computed with.
    """

    count: int
    rank: int

    def __post_init__(self) -> None:
        check_counts(self, "count", "rank")


@dataclasses.dataclass(frozen=True)
class TokenNGrams:
    """Options of the embeddings of n-grams of tokens (Qwen4). See `decodax.models.residual.ngrams`.

    Attributes:
        width: number of channels of a token's embeddings, those of all tables together.
        size: number of tokens `n` of the longest n-gram; there are tables for pairs, triples, ... of tokens.
        heads: number of tables for the n-grams of each length.
        base: every table has a prime number of rows, at least this many, each a different one.
        number: number of this layer among those with embeddings of n-grams, from 0 on. It decides on the primes and on
            the hash.
        seed: seed of the hash.
        multiple: the number of rows of all tables is padded to a multiple of this.
        stop: id of the token that ends a text. N-grams do not reach before it.
        vocab: number of tokens.
        streams: number of residual streams, and of channels of each.
        conv: number of taps of the convolution over the embeddings, which are `size` tokens apart.
    """

    width: int
    size: int
    heads: int
    base: int
    number: int
    seed: int
    multiple: int
    stop: int
    vocab: int
    streams: tuple[int, int]
    conv: int = 4

    def __post_init__(self) -> None:
        check_counts(self, "width", "heads", "base", "multiple", "vocab", "conv")
        if self.size < 2:
            raise ValueError(f"size: got {self.size}, takes 2 or more tokens")
        if self.width % self.tables:
            raise ValueError(f"width: got {self.width}, takes a multiple of the number of tables, {self.tables}")
        if not 0 <= self.stop < self.vocab:
            raise ValueError(f"stop: got {self.stop}, takes a token id below {self.vocab}")
        if self.base > 1 << 27 or self.tables * (self.number + 1) > 1 << 12 or self.rows >= 1 << 31:
            raise ValueError(f"base: got {self.base} for {self.tables} tables, takes at most {1 << 27}, at most "
                             f"{1 << 12} tables of all layers, and rows of a layer that 31 bits number")

    @property
    def tables(self) -> int:
        """Number of tables."""
        return (self.size - 1) * self.heads

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each table, a prime number."""
        return primes(self.base, self.tables * (self.number + 1))[self.tables * self.number:]

    @property
    def rows(self) -> int:
        """Number of rows of all tables together."""
        return -(-sum(self.sizes) // self.multiple) * self.multiple

    @property
    def multipliers(self) -> tuple[int, ...]:
        """The odd factors of the hash, one for each token of an n-gram, the last token first. A product of one with a
        token id has at most 63 bits."""
        half = max(1, (2 ** 63 - 1) // self.vocab // 2)
        start = self.seed + 10_007 * self.number
        return tuple(2 * (_mixed((start + GOLDEN * (i + 1)) % 2 ** 64) % half) + 1 for i in range(self.size))

    @property
    def span(self) -> int:
        """Number of tokens before a token that its output of the convolution depends on."""
        return (self.conv - 1) * self.size


GOLDEN = 0x9E37_79B9_7F4A_7C15
"""`2 ** 64` divided by the golden ratio, the step of SplitMix64."""


def _mixed(x: int) -> int:
    """Returns the number of 64 bits that SplitMix64 makes of the state `x` (Steele, Lea and Flood, 2014)."""
    x = (x + GOLDEN) % 2 ** 64
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        x = (x ^ x >> shift) * factor % 2 ** 64
    return x ^ x >> 31


@functools.cache
def primes(least: int, count: int) -> tuple[int, ...]:
    """Returns the first `count` prime numbers from `least` on.

    >>> primes(8, 3)
    (11, 13, 17)
    """
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Options of per-layer embeddings. See `decodax.models.residual.layer_inputs`.

    Attributes:
        width: number of channels `d` of a layer's embedding of a token.
        rows: number of tokens that the table has. Tokens from there on have the embedding of token 0.
    """

    width: int
    rows: int

    def __post_init__(self) -> None:
        check_counts(self, "width", "rows")
