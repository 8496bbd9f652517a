"""Prefixes in files ("CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving", Liu et al.,
2024): its codec; what it decides by the bandwidth of a network is not here.

Neighbouring tokens have similar keys and values. Of each `group` tokens the first is an anchor, kept in 8 bits; of the
others the differences from it are kept, in steps that are coarser in deeper layers, which matter less. The steps of a
channel are multiples of the standard deviation of its differences, and their numbers are written with as many bits as
their frequency in their channel of their layer says.
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

from decodax.caches.prefix.entropy import decoded, encoded, frequencies, from_16_bits, in_16_bits
from decodax.caches.prefix.prefix import Prefix

VERSION = 1

LARGEST = (1 << 15) - 1
"""Steps of a difference, so that with its sign it fits 16 bits."""


@dataclasses.dataclass(frozen=True)
class CacheGen:
    """How prefixes are written.

    Attributes:
        group: tokens of which the first is an anchor.
        steps: of differences, in standard deviations, for the first third of the layers, the second and the last.
        most: the largest number of steps of a difference, up to 32,767; beyond it differences are cut.
    """

    group: int = 10
    steps: tuple[float, float, float] = (0.5, 1.0, 1.5)
    most: int = 255

    def __post_init__(self) -> None:
        if self.group < 1 or not 1 <= self.most <= LARGEST or len(self.steps) != 3 or min(self.steps) <= 0:
            raise ValueError(f"group, steps, most: got {self.group}, {self.steps} and {self.most}, takes 1 or more, "
                             f"three numbers above 0, and 1 to {LARGEST}")

    def save(self, prefix: Prefix, file: str | os.PathLike[str] | io.BufferedIOBase) -> None:
        """Writes a prefix into a file, which `load_prefix` reads."""
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
        """The parts of `f32[T, C]`."""
        codes, scales = anchors(x[::self.group])
        behind, of = others(len(x), self.group)
        apart = x[behind] - (codes * scales[:, None])[of]
        sizes = (step * apart.std(0) if len(apart) else np.zeros(x.shape[1])).astype(np.float32)
        numbers = np.clip(np.round(apart / np.where(sizes > 0, sizes, 1)), -self.most, self.most).astype(np.int64)
        low = numbers.min(0, initial=0)
        symbols = numbers - low
        share = frequencies(symbols, int(symbols.max(initial=0)) + 1)
        state, words = encoded(symbols, share)
        return {"anchors": codes, "scales": scales, "sizes": sizes, "low": low.astype(np.int16),
                "share": in_16_bits(share), "state": state, "words": words}


def anchors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`i8[n, C]` and `f32[n]`: tokens `f32[n, C]` in 8 bits, by the largest number of each."""
    scales = (np.abs(x).max(1, initial=0) / 127).astype(np.float32)
    return np.round(x / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8), scales


def others(length: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are no anchors, and the number of the anchor of each."""
    at = np.arange(length)
    behind = at[at % group > 0]
    return behind, behind // group


def save_prefix(prefix: Prefix, file: Any, group: int = 10, steps: Sequence[float] = (0.5, 1.0, 1.5)) -> None:
    """Writes a prefix into a file in CacheGen's form; see `CacheGen`.

    Args:
        file: a path, or a binary file that is open for writing.
    """
    CacheGen(group, tuple(map(float, steps))).save(prefix, file)        # type: ignore[arg-type]


def load_prefix(file: Any) -> Prefix:
    """Reads a prefix that `save_prefix` wrote.

    Args:
        file: a path, or a binary file that is open for reading.

    Raises:
        ValueError: a file that is none, or that has been cut.
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
    behind, of = others(T, group)
    first = own["anchors"] * own["scales"][:, None]
    numbers = decoded(own["state"], own["words"], from_16_bits(own["share"]), len(behind)) + own["low"]
    x = np.empty((T, G * w), np.float32)
    x[::group] = first
    x[behind] = first[of] + numbers * own["sizes"]
    return x.reshape(T, G, w).swapaxes(0, 1).astype(jnp.dtype(str(own["dtype"])))
