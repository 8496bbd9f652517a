"""Which tokens stay: how many each layer and head may keep, and in what units they go.

A selection turns scores into masks of the same number of tokens, or of numbers that differ from layer to layer, from
head to head, or with the text. How many a text of each length keeps is a table, so that shares are rounded as in Python
and rows of any length are served by one program.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.query_scores import Critical, WindowAttention
from decodax.caches.evict.scores import TokenScore
from decodax.common.arguments import shown

Budget = int | float | str
"""Tokens of a layer's head, or (below 1) their share of the text so far, or bytes of a row's whole cache: "64MB"."""

UNITS = {"B": 1, **{prefix + "B": 1000 ** (i + 1) for i, prefix in enumerate(("k", "M", "G", "T"))},
         **{prefix + "iB": 1024 ** (i + 1) for i, prefix in enumerate(("K", "M", "G", "T"))}}


def in_bytes(budget: str, name: str = "budget", takes: str = "bytes as '64MB' or '1.5GiB'") -> int:
    """How many bytes a budget says; `name` and `takes` are for the error.

    >>> in_bytes("1.5MB"), in_bytes("2KiB")
    (1500000, 2048)

    Raises:
        ValueError: no number with a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B)\s*", budget) if isinstance(budget, str) else None
    unit = found and found[2].replace("KB", "kB")
    if not found or unit not in UNITS or not float(found[1]):
        raise ValueError(f"{name}: got {shown(budget)}, takes {takes}")
    return int(float(found[1]) * UNITS[unit])


def kept(budget: Budget, longest: int) -> np.ndarray:
    """`i32[longest + 1]`: how many tokens a text of each length keeps."""
    if isinstance(budget, int):
        return np.minimum(np.arange(longest + 1), budget).astype(np.int32)
    share = float(budget)
    return np.array([int(n * share) for n in range(longest + 1)], np.int32)


def best(worth: Array, valid: Array, count: Array) -> Array:
    """`bool[G, S]`: the `count` (`i32[G]` or `i32[]`) best slots of each head, the newer ones where they tie."""
    slots = worth.shape[-1]
    newer = jnp.arange(slots - 1, -1, -1, dtype=jnp.int32)
    order = jnp.lexsort((jnp.broadcast_to(newer, worth.shape), jnp.where(valid, -worth, jnp.inf), ~valid), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return valid & (rank < jnp.asarray(count)[..., None])


def whole(count: Array, share: float) -> Array:
    """A share of a number of tokens, rounded down."""
    return (count * share + 1e-4).astype(jnp.int32)


class Selection(abc.ABC):
    """Derive a frozen dataclass with a field `score` from this.

    Attributes:
        compares: whether layers share their tokens; then `choose_all` is asked what stays, else `choose`.
    """

    score: TokenScore
    compares: ClassVar[bool] = False

    @property
    def uniform(self) -> bool:
        """Whether all heads of a layer keep as many tokens."""
        return True

    def of_model(self, lm: Any) -> Selection:
        """As `CacheConfig.of_model`."""
        return dataclasses.replace(self, score=self.score.of_model(lm))     # type: ignore[type-var]

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """`i32[longest + 1]`: how many tokens a head of a layer keeps of a text of each length, on the average of the
        layer's heads."""
        return kept(budget, longest)

    def slots(self, table: np.ndarray, heads: int) -> int:
        """The most tokens that one head of a layer keeps, by the layer's table."""
        return int(table.max())

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        """The most tokens that the heads of a layer keep together, if they keep different numbers and that is less than
        as many times what one may keep: then their memory is that of the sum (`decodax.cache.packed_heads`)."""
        return None

    @abc.abstractmethod
    def choose(self, held: HeldLayer, count: Array) -> Array:
        """`bool[G, S]`: what stays of a layer, `count` tokens (`i32[]`) of each head."""

    def choose_all(self, held: Sequence[HeldLayer], counts: Sequence[Array]) -> Sequence[Array]:
        """`bool[G, S]` of each layer: what stays, by rules that compare layers."""
        return [self.choose(own, count) for own, count in zip(held, counts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Top(Selection):
    """The best tokens of each head."""

    score: TokenScore

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return best(self.score(held), held.valid, count)


@dataclasses.dataclass(frozen=True)
class LatestHalf(Top):
    """Half of what stays are the latest tokens, the other half the best of the others (H2O), whatever the budget is
    counted in."""

    def choose(self, held: HeldLayer, count: Array) -> Array:
        latest = held.index >= (held.count - count // 2)[:, None]
        return best(jnp.where(latest, jnp.inf, self.score(held)), held.valid, count)


@dataclasses.dataclass(frozen=True)
class NearestTop(Top):
    """`Top`, where a share of a text is the nearest number of tokens, and not the one below (PrefixKV)."""

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        if isinstance(budget, int):
            return kept(budget, longest)
        tokens = np.arange(longest + 1)
        return (tokens - np.rint(tokens * (1 - float(budget)))).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Pyramid(Selection):
    """More tokens for the first layers and fewer for the last ("PyramidKV: Dynamic KV Cache Compression based on
    Pyramidal Information Funneling", Cai et al., 2024).

    With `n` tokens a layer beyond the window on the average, the last layer keeps `n / beta` and the first as many more
    as it keeps fewer; between them the numbers fall evenly. Where a text has fewer tokens than the first layer is to
    keep, that keeps all of them. A number of tokens is divided as the authors do, in whole numbers: a text shorter than
    the budget stays whole, and one of less than `2 n` tokens keeps the budget in every layer. A share of the text is
    divided and rounded as kvpress does.
    """

    score: WindowAttention = WindowAttention()
    beta: int = 20

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ValueError(f"beta: got {self.beta}, takes 1 or more")

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        window = self.score.window

        def authors(length: int, budget: int) -> int:
            beyond = budget - window
            if length < budget or depth < 2:
                return min(length, budget)
            if length < 2 * beyond:
                return budget
            most = min(2 * beyond - beyond // self.beta, length - window)
            least = beyond // self.beta if most < length - window else 2 * beyond - most
            return most - layer * ((most - least) // (depth - 1)) + window

        def kvpress(length: int, share: float) -> int:      # counts the window as part of the share
            mean = length * share
            least = mean / self.beta
            most = mean * 2 - least
            if most >= length - window:
                most = length - window
                least = mean * 2 - most
            if depth < 2 or not length >= most >= least >= window:
                return round(mean)
            return round(most - layer * (most - least) / (depth - 1))

        one = authors if isinstance(budget, int) else kvpress
        return np.array([one(n, budget) for n in range(longest + 1)], np.int32)      # type: ignore[arg-type]

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return best(self.score(held), held.valid, count)


@dataclasses.dataclass(frozen=True)
class Chunks(Selection):
    """Whole chunks of tokens, the same ones in every head ("ChunkKV: Semantic-Preserving KV Cache Compression for
    Efficient Long-Context LLM Inference", Liu et al., 2025).

    A chunk's score is the mean over its tokens of the scores, added up over heads; the last chunk may be shorter. So
    many chunks stay as go into the budget, at least one: of a share of the text, that share of the chunks.

    Attributes:
        chunk: tokens of a chunk.
    """

    score: TokenScore
    chunk: int = 10

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}, takes 1 or more")

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """In chunks, not in tokens."""
        chunks = -(-np.arange(longest + 1) // self.chunk)
        if isinstance(budget, int):
            return np.minimum(chunks, max(budget // self.chunk, 1)).astype(np.int32)
        share = float(budget)
        return np.array([max(1, int(n * share)) if n else 0 for n in chunks.tolist()], np.int32)

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) * self.chunk

    def choose(self, held: HeldLayer, count: Array) -> Array:
        several = -(-held.slots // self.chunk)
        pad = ((0, 0), (0, several * self.chunk - held.slots))
        valid = jnp.pad(held.valid[0], pad[1]).reshape(several, self.chunk)
        worth = jnp.pad(jnp.where(held.valid, self.score(held), 0), pad).sum(0).reshape(several, self.chunk)
        mean = worth.sum(1) / jnp.maximum(valid.sum(1), 1)
        chosen = best(mean[None], valid.any(1)[None], count)[0]
        return jnp.broadcast_to(jnp.repeat(chosen, self.chunk)[:held.slots], held.valid.shape) & held.valid


@dataclasses.dataclass(frozen=True)
class AdaptiveHeads(Selection):
    """The heads of a layer share their tokens: the best of all of them stay ("Ada-KV: Optimizing KV Cache Eviction by
    Adaptive Budget Allocation for Efficient LLM Inference", Feng et al., 2024).

    Attributes:
        floor: the share of an even budget that each head keeps in any case.
        most: a head keeps at most so many times an even budget, which bounds what memory it takes; None: any number.
    """

    score: TokenScore
    floor: float = 0.2
    most: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor: got {self.floor}, takes 0 to 1")
        if self.most is not None and self.most < 1:
            raise ValueError(f"most: got {self.most}, takes 1 or more, or None")

    @property
    def uniform(self) -> bool:
        return False

    def slots(self, table: np.ndarray, heads: int) -> int:
        even = int(table.max())
        own = even * heads - (heads - 1) * int(even * self.floor)
        return min(len(table) - 1, own if self.most is None else min(own, int(even * self.most)))

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        return int(table.max()) * heads

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return self.shared(self.score(held), held.valid, count)

    def shared(self, worth: Array, valid: Array, count: Array) -> Array:
        """`bool[G, S]`: the best of all heads, `count` of each on the average."""
        safe = best(worth, valid, whole(count, self.floor))
        worth = jnp.where(safe, jnp.inf, worth)
        if self.most is not None:
            valid = best(worth, valid, jnp.floor(count * self.most).astype(jnp.int32))
        total = jnp.minimum(count * worth.shape[0], valid.sum())
        return best(worth.reshape(1, -1), valid.reshape(1, -1), total).reshape(valid.shape)


@dataclasses.dataclass(frozen=True)
class AcrossLayers(Selection):
    """All heads of all layers share their tokens: the best of all of them stay (KVzip: Kim et al., 2025).

    Attributes:
        most: a head keeps at most so many times an even budget, which bounds what memory it takes; None: any number.
    """

    score: TokenScore
    most: float | None = None

    compares = True

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ValueError(f"most: got {self.most}, takes 1 or more, or None")

    @property
    def uniform(self) -> bool:
        return False

    def slots(self, table: np.ndarray, heads: int) -> int:
        return len(table) - 1 if self.most is None else min(len(table) - 1, int(int(table.max()) * self.most))

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return self.choose_all([held], [count])[0]

    def choose_all(self, held: Sequence[HeldLayer], counts: Sequence[Array]) -> Sequence[Array]:
        worth, valid = [self.score(own) for own in held], [own.valid for own in held]
        if self.most is not None:
            most = [jnp.floor(count * self.most).astype(jnp.int32) for count in counts]
            valid = [best(*own) for own in zip(worth, valid, most, strict=True)]
        total = sum(count * own.shape[0] for own, count in zip(worth, counts, strict=True))
        flat = lambda xs: jnp.concatenate([x.reshape(-1) for x in xs])[None]
        chosen = best(flat(worth), flat(valid), jnp.asarray(total))[0]
        ends = np.cumsum([own.size for own in worth])[:-1]
        return [part.reshape(own.shape) for part, own in zip(jnp.split(chosen, ends), worth, strict=True)]


@dataclasses.dataclass(frozen=True)
class TwoStages(Selection):
    """A share of the tokens by one score, the others by what their values change in the output (CriticalKV: Feng et
    al., 2025).

    Attributes:
        first: the share.
        floor: the heads of a layer share their tokens as in `AdaptiveHeads`, which says how many each keeps; None: all
            keep as many.
        most: as there.
    """

    score: Critical
    first: float = 0.5
    floor: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise ValueError(f"first: got {self.first}, takes 0 to 1")

    @property
    def uniform(self) -> bool:
        return self.floor is None

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) if self.floor is None else AdaptiveHeads(
            self.score, self.floor, self.most).slots(table, heads)

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        return None if self.floor is None else int(table.max()) * heads

    def choose(self, held: HeldLayer, count: Array) -> Array:
        worth, valid = self.score.score(held), held.valid
        own: Array = jnp.broadcast_to(count, held.count.shape)
        first = whole(own, self.first)
        if self.floor is not None:
            own = AdaptiveHeads(self.score, self.floor, self.most).shared(worth, valid, count).sum(-1)
            first = jnp.maximum(whole(own, self.first), whole(count, self.floor))
        chosen = best(worth, valid, first)
        return best(jnp.where(chosen, jnp.inf, self.score.weighted(held, worth)), valid, own)


def layers_of(selection: Selection, budget: Budget | tuple[Budget, ...], longest: int,
              depth: int) -> Sequence[np.ndarray]:
    """The table of each layer; layers with equal tables share one.

    Raises:
        ValueError: budgets of another number of layers.
    """
    if isinstance(budget, tuple) and len(budget) != depth:
        raise ValueError(f"budget: got one for each of {len(budget)} layers, the model has {depth}")
    tables: list[np.ndarray] = []
    for layer in range(depth):
        own = selection.table(budget[layer] if isinstance(budget, tuple) else budget, longest, layer, depth)
        tables.append(next((t for t in tables if np.array_equal(t, own)), own))
    return tables
