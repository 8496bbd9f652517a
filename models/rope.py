"""Rotary position embedding (Su et al., 2021) and the scalings that extend it to longer contexts.

Two scalings depend on the length of the sequence (`Dynamic`, `LongRope`). Frequencies that change while a sequence
grows would make cached keys wrong, and a row would depend on the other rows of its batch. So the length is a fixed
option of the model (`Transformer.context`): the frequencies are those of a sequence of that many tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array


class Scaling(Protocol):
    """The interface of a change of the rotary frequencies. It is hashable."""

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        """Returns the angle per position of each frequency, `f64[width / 2]`, and a factor of cosine and sine.

        Args:
            width: number of rotated entries of a head.
            theta: base of the frequencies.
            context: length of the sequence in tokens; None: the trained length.
        """


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Positions that restart in each chunk of a text; see `decodax.models.dual_chunk`.

    Attributes:
        size: the largest position that is rotated.
        local: distances up to this are exact across the border of two chunks.
        trained: length of texts up to which cosine and sine have no factor. For longer ones they have YaRN's factor for
            the length `Transformer.context`. None: never a factor.
    """

    size: int
    local: int
    trained: int | None = None

    def __post_init__(self) -> None:
        if self.size < 2 or not 0 <= self.local < self.size:
            raise ValueError(f"chunks: got a size of {self.size} and a local size of {self.local}, takes a size of 2 "
                             "or more and a local size below it")
        if self.trained is not None and self.trained < 1:
            raise ValueError(f"original_max_position_embeddings: got {self.trained}, takes 1 or more")

    @property
    def length(self) -> int:
        """Number of tokens of a chunk."""
        return self.size - self.local

    @property
    def farthest(self) -> int:
        """Position of all queries for keys that are at least two chunks earlier."""
        return min(2 * self.length - 1, self.size)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of the first `width` entries of each head by angles `position * theta ** (-2 i / width)`.

    Attributes:
        width: number of rotated entries, even.
        theta: base of the frequencies.
        scaling: a change of the frequencies, or None.
        interleaved: True rotates pairs of adjacent entries (as in GPT-J, GLM and Cohere); False pairs the two halves of
            the rotated entries (as in GPT-NeoX and most of Hugging Face's files).
        chunks: for dual chunk attention: positions are counted within a chunk; None: within the text.
        axes: for each frequency, which of the three numbers of a position belongs to it (M-RoPE, Wang et al., 2024; see
            `decodax.models.images`); None: positions have one number.
    """

    width: int
    theta: float = 10_000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    chunks: Chunks | None = None
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(f"rope width: got {self.width}, takes an even number from 2")
        for context in (None, 1 << 31):         # as trained, and the largest length for scalings that depend on it
            frequencies, factor = self._scaled(context)
            if not np.isfinite([*frequencies, factor]).all():
                raise ValueError(f"rope scaling: got {self.scaling}, which gives no finite frequencies")

    def _scaled(self, context: int | None) -> tuple[np.ndarray, float]:
        scaling = LinearScaling(1.0) if self.scaling is None else self.scaling
        with np.errstate(all="ignore"):
            return scaling.scaled(self.width, self.theta, context)

    def table(self, positions: Array, context: int | None = None, factors: Array | None = None) -> tuple[Array, Array]:
        """Returns cosine and sine, `f32[B, W, 1, width / 2]`, at positions `i32[B, W]`, or `i32[B, W, 3]` with `axes`.
        `factors`, `f32[width / 2]`, multiply the frequencies; None: they are as they are.

        Raises:
            ValueError: positions have one number, and there are `axes`.
        """
        fixed, factor = self._scaled(context)
        frequencies = fixed if factors is None else fixed.astype(np.float32) * factors
        if self.axes is not None:
            if positions.ndim != 3 or self.chunks is not None:
                raise ValueError("inputs: got images whose positions have three numbers (M-RoPE), which a cache that "
                                 "rotates keys to other positions and dual chunk attention do not take")
            cos, sin = _turn(positions[..., None, np.array(self.axes)], frequencies)
            return cos * factor, sin * factor
        if self.chunks is not None:
            # Rotations stay within a chunk, so no text is longer than one for the scaling.
            frequencies, factor = self._scaled(self.chunks.size)
            positions = positions % self.chunks.length
            factor *= mscale((context or 0) / self.chunks.trained) if self.chunks.trained else 1.0
        cos, sin = _turn(positions[..., None, None], frequencies)
        return cos * factor, sin * factor

    def turn(self, x: Array, by: Array) -> Array:
        """Rotates `x` (`f[..., d]`), which has been rotated by its position within a chunk, by another `by` (`i32[...,
        1]`) positions."""
        assert self.chunks is not None
        return rotate(x, *_turn(by, self._scaled(self.chunks.size)[0]), self.interleaved)


def _turn(by: Array, frequencies: np.ndarray | Array) -> tuple[Array, Array]:
    angles = by.astype(jnp.float32) * frequencies.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotates the first `2 * cos.shape[-1]` entries of `x` (`f[..., d]`); the other entries do not change."""
    half = cos.shape[-1]
    a, b = (x[..., :2 * half:2], x[..., 1:2 * half:2]) if interleaved else (x[..., :half], x[..., half:2 * half])
    rest = x[..., 2 * half:]
    a, b = (a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)
    turned = [jnp.stack([a, b], -1).reshape(*x.shape[:-1], 2 * half)] if interleaved else [a, b]
    return jnp.concatenate([*turned, rest], axis=-1)


def rotate_last(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotates the last `2 * cos.shape[-1]` entries of `x` (`f[..., d]`); the other entries do not change."""
    plain = x.shape[-1] - 2 * cos.shape[-1]
    return jnp.concatenate([x[..., :plain], rotate(x[..., plain:], cos, sin, interleaved)], -1)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: all frequencies divided by `factor` (Chen et al., 2023)."""

    factor: float

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        return _frequencies(width, theta) / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """NTK-aware scaling (bloc97 and emozilla, 2023): the base of the frequencies grows with the length of the sequence
    beyond `trained`.

    At a length of `n > trained` tokens, the base is multiplied by `(factor n / trained - factor + 1) ** (width / (width
    - 2))`.

    Attributes:
        factor: see the formula; larger values stretch the frequencies more.
        trained: the trained context length, in tokens.
    """

    factor: float
    trained: int

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        length = max(context or 0, self.trained)
        stretch = self.factor * length / self.trained - (self.factor - 1)
        return _frequencies(width, theta * stretch ** (width / (width - 2))), 1.0


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., 2023): scales rotary frequencies for a context longer than the trained one.

    Frequencies that make more than `beta_fast` full turns within `trained` tokens are kept; those that make fewer than
    `beta_slow` are divided by `factor`. Between the two, the change is linear in the index of the frequency.

    Attributes:
        factor: new context length divided by the trained one.
        trained: context length before scaling, in tokens.
        beta_fast: number of turns from which frequencies are kept.
        beta_slow: number of turns below which frequencies are divided by `factor`.
        attention_factor: multiplier of cosine and sine. None: `0.1 ln(factor) + 1`, or 1 if `factor` is at most 1.
        truncate: True rounds the indices where the ramp begins and ends, down and up.
    """

    factor: float
    trained: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        def index(turns: float) -> float:       # index of the frequency that makes this number of turns
            return width * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = np.clip((np.arange(width // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        plain = _frequencies(width, theta)
        factor = self.attention_factor
        if factor is None:
            factor = mscale(self.factor)
        return plain / self.factor * ramp + plain * (1 - ramp), factor


@dataclasses.dataclass(frozen=True)
class Proportional:
    """The frequencies of the whole width, of which only the first, the highest ones, turn (Gemma 4; Google, 2026).

    Attributes:
        turning: number of frequencies that turn; the others are 0.
        factor: divisor of the frequencies.
    """

    turning: int
    factor: float = 1.0

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        turns = np.arange(width // 2) < self.turning
        return np.where(turns, _frequencies(width, theta), 0.0) / self.factor, 1.0


def mscale(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's factor of cosine and sine for a context `factor` times as long.

    >>> mscale(1.0), round(mscale(4.0), 4)
    (1.0, 1.1386)
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al., 2024): divides each frequency by a number of its own, with one set of numbers for
    sequences of up to `trained` tokens and another for longer ones.

    Attributes:
        short: `width / 2` divisors for up to `trained` tokens.
        long: `width / 2` divisors for longer sequences.
        trained: the trained context length, in tokens.
        attention_factor: multiplier of cosine and sine.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    attention_factor: float

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        divisors = self.long if (context or 0) > self.trained else self.short
        if len(divisors) != width // 2:
            raise ValueError(f"longrope factors: got {len(divisors)}, a rotary width of {width} takes {width // 2}")
        return _frequencies(width, theta) / np.asarray(divisors), self.attention_factor


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling (Dubey et al., 2024): long wavelengths are multiplied by `factor`, short ones kept, with a
    smooth transition.

    Attributes:
        factor: multiplier of long wavelengths.
        low: wavelengths above `trained / low` are long.
        high: wavelengths below `trained / high` are short.
        trained: the trained context length, in tokens.
    """

    factor: float
    low: float
    high: float
    trained: int

    def scaled(self, width: int, theta: float, context: int | None) -> tuple[np.ndarray, float]:
        plain = _frequencies(width, theta)
        turns = self.trained * plain / (2 * math.pi)
        smooth = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return plain * ((1 - smooth) / self.factor + smooth), 1.0


def _frequencies(width: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
