"""CacheGen: saves prefixes in compressed files ("CacheGen: KV Cache Compression and Streaming for Fast Large Language
Model Serving", Liu et al., 2024). Only its codec is implemented, not its choice of a compression level by network
bandwidth.

Neighbouring tokens have similar keys and values. The first token of each group of `group` tokens is the anchor, which
is stored in 8 bits. For the other tokens, the differences from their anchor are quantized, with larger steps in deeper
layers, which matter less. The step of a channel is a multiple of the standard deviation of its differences. The codes
are entropy coded with the frequencies of their channel and layer.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from decodax.cache.prefix import Prefix
from decodax.caches.prefix.entropy import decoded, encoded, frequencies, from_16_bits, in_16_bits

VERSION = 1

LARGEST = (1 << 15) - 1
"""Largest number of quantization steps of a difference, so that it fits in 16 bits with its sign."""


@dataclasses.dataclass(frozen=True)
class CacheGen:
    """A codec that stores the keys and values of prefixes in small files: the first token of each group (the anchor) in
    8 bits, and the others as quantized, entropy-coded differences from it.

    Attributes:
        group: number of tokens of a group.
        steps: quantization steps of differences, in standard deviations, for the first, second and last third of the
            layers.
        most: largest number of steps of a difference, at most 32,767; larger differences are clipped.
    """

    group: int = 10
    steps: tuple[float, float, float] = (0.5, 1.0, 1.5)
    most: int = 255

    def __post_init__(self) -> None:
        if self.group < 1 or not 1 <= self.most <= LARGEST or len(self.steps) != 3 or min(self.steps) <= 0:
            raise ValueError(f"group, steps, most: got {self.group}, {self.steps} and {self.most}, takes 1 or more, "
                             f"three numbers above 0, and 1 to {LARGEST}")

    def save(self, prefix: Prefix, file: str | os.PathLike[str] | io.BufferedIOBase) -> None:
        """Saves a prefix to a file, which `load_prefix` reads."""
        depth = len(prefix.kv)
        parts: dict[str, np.ndarray] = {}
        for layer, kv in enumerate(prefix.kv):
            G, T, w = kv.shape
            parts |= {f"{layer}.{name}": x for name, x in self._layer(
                kv.swapaxes(0, 1).reshape(T, G * w).astype(np.float32), self.steps[3 * layer // depth]).items()}
            parts[f"{layer}.shape"] = np.array([G, T, w])
            parts[f"{layer}.dtype"] = np.array(str(kv.dtype))
        np.savez(file, version=np.array(VERSION), group=np.array(self.group), tokens=np.array(prefix.tokens, np.int32),
                 begin=np.array(prefix.begin), **parts)       # type: ignore[arg-type]

    def _layer(self, x: np.ndarray, step: float) -> dict[str, np.ndarray]:
        """Encodes a layer `f32[T, C]` as named arrays of the file."""
        codes, scales = anchors(x[::self.group])
        rest, of = others(len(x), self.group)
        apart = x[rest] - (codes * scales[:, None])[of]
        sizes = (step * apart.std(0) if len(apart) else np.zeros(x.shape[1])).astype(np.float32)
        numbers = np.clip(np.round(apart / np.where(sizes > 0, sizes, 1)), -self.most, self.most).astype(np.int64)
        low = numbers.min(0, initial=0)
        symbols = numbers - low
        share = frequencies(symbols, int(symbols.max(initial=0)) + 1)
        state, words = encoded(symbols, share)
        return {"anchors": codes, "scales": scales, "sizes": sizes, "low": low.astype(np.int16),
                "share": in_16_bits(share), "state": state, "words": words}


def anchors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes tokens `f32[n, C]` to 8 bits. Returns `i8[n, C]` and the scale of each token, `f32[n]`."""
    scales = (np.abs(x).max(1, initial=0) / 127).astype(np.float32)
    return np.round(x / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8), scales


def others(length: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the tokens that are not the first ones of their groups, in a text of `length` tokens in
    groups of `group`, and the number of the group of each."""
    at = np.arange(length)
    rest = at[at % group > 0]
    return rest, rest // group


def save_prefix(prefix: Prefix, file: Any, group: int = 10, steps: Sequence[float] = (0.5, 1.0, 1.5)) -> None:
    """Saves a prefix to a file in CacheGen's format.

    Args:
        prefix: the prefix.
        file: a path, or a binary file that is open for writing.
        group, steps: see `CacheGen`.
    """
    CacheGen(group, tuple(map(float, steps))).save(prefix, file)        # type: ignore[arg-type]


def load_prefix(file: Any) -> Prefix:
    """Reads a prefix that `save_prefix` wrote.

    Args:
        file: a path, or a binary file that is open for reading.

    Raises:
        ValueError: the file was not written by `save_prefix`, or is truncated.
    """
    try:
        with np.load(file) as parts:
            if "version" not in parts or int(parts["version"]) != VERSION:
                raise ValueError(f"file: got no prefix of version {VERSION}")
            group, tokens, begin = int(parts["group"]), parts["tokens"], int(parts["begin"])
            kv: list[np.ndarray] = []
            while f"{len(kv)}.shape" in parts:
                kv.append(_restored({name: parts[f"{len(kv)}.{name}"] for name in (
                    "anchors", "scales", "sizes", "low", "share", "state", "words", "shape", "dtype")}, group))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"file: got no prefix that save_prefix wrote: {error}") from error
    return Prefix(tuple(tokens.tolist()), tuple(kv), begin)


def _restored(own: dict[str, np.ndarray], group: int) -> np.ndarray:
    G, T, w = own["shape"]
    rest, of = others(T, group)
    first = own["anchors"] * own["scales"][:, None]
    numbers = decoded(own["state"], own["words"], from_16_bits(own["share"]), len(rest)) + own["low"]
    x = np.empty((T, G * w), np.float32)
    x[::group] = first
    x[rest] = first[of] + numbers * own["sizes"]
    return x.reshape(T, G, w).swapaxes(0, 1).astype(jnp.dtype(str(own["dtype"])))
