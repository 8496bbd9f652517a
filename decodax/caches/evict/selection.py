"""The contract of a selection: it chooses the tokens to keep, and how many in each layer and head.

A selection turns scores into a mask of the tokens to keep. The number of tokens to keep for each length of the text is
a table that is computed on the host. So shares are rounded as in Python, and rows of all lengths use one program.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.common.options import Checked, Count, Range

Budget = Count | Annotated[float, Range(0, 1, above=True, below=True)] | str
"""Number of tokens that each head of a layer keeps; below 1, their share of the text so far; or the bytes that a row's
cache may take in all layers, such as "64MB"."""

Every = Count | None
"""Number of tokens between two evictions while decoding. None: the rule runs once, after the prompt."""


def kept(budget: Budget, longest: int) -> np.ndarray:
    """Returns the number of tokens to keep of each text of 0 to `longest` tokens, `i32[longest + 1]`: at most `budget`
    tokens, or the share `budget` of the text, rounded down."""
    if isinstance(budget, int):
        return np.minimum(np.arange(longest + 1), budget).astype(np.int32)
    share = float(budget)
    return np.array([int(n * share) for n in range(longest + 1)], np.int32)


def best(worth: Array, valid: Array, count: Array) -> Array:
    """Returns a mask of the filled slots of highest score in each head, `bool[G, S]`.

    Args:
        worth: `f32[G, S]`, scores. Of equal scores, the newer slot (of higher index) is taken.
        valid: `bool[G, S]`, the filled slots.
        count: `i32[G]` or `i32[]`, number of slots to take from each head.
    """
    slots = worth.shape[-1]
    newer = jnp.arange(slots - 1, -1, -1, dtype=jnp.int32)
    order = jnp.lexsort((jnp.broadcast_to(newer, worth.shape), jnp.where(valid, -worth, jnp.inf), ~valid), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return valid & (rank < jnp.asarray(count)[..., None])


def whole(count: Array, share: float) -> Array:
    """Returns `count * share` rounded down, in the dtype int32; 1e-4 is added first, so that rounding errors do not
    matter."""
    return (count * share + 1e-4).astype(jnp.int32)


class Selection(Checked, abc.ABC):
    """Base of rules that choose the tokens to keep. Derive a frozen dataclass with a field `score`, which is static
    under jit.

    Attributes:
        score: score of the tokens.
        compares: True if layers share a budget; `choose_all` is called then, else `choose`.
        uniform: True if all heads of a layer keep the same number of tokens.
        projects: True if the rule needs `HeldLayer.outputs`, which are available after prefill only.
    """

    score: TokenScore
    compares: ClassVar[bool] = False
    uniform: ClassVar[bool] = True
    projects: ClassVar[bool] = False

    def check(self, shapes: Sequence[KVLayer]) -> None:
        """Raises ValueError if the options do not fit a model whose layers have these shapes. Called when a cache is
        made."""
        self.score.check(shapes)

    def of_model(self, lm: Any) -> Selection:
        """Returns the selection with what its score needs of a loaded model; see `CacheConfig.of_model`."""
        return dataclasses.replace(self, score=self.score.of_model(lm))     # type: ignore[type-var]

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """Returns the number of tokens that a head keeps (the mean over the heads of the layer) for each text of 0 to
        `longest` tokens, `i32[longest + 1]`.

        Args:
            budget: number of tokens of a head; below 1, their share of the text.
            longest: maximum number of tokens of a text.
            layer, depth: number of the layer, and number of layers of the model.
        """
        return kept(budget, longest)

    def slots(self, table: np.ndarray, heads: int) -> int:
        """Returns the maximum number of tokens that one head of a layer keeps, for a layer with `heads` heads and the
        numbers `table` (from `Selection.table`)."""
        return int(table.max())

    def together(self, table: np.ndarray, heads: int, layer: int) -> int | None:
        """Returns the maximum total number of tokens that the heads of a layer keep, if each head may keep another
        number; they then share one array (`decodax.cache.packed_heads`). None, the default: each head has its own
        array.

        Args:
            table: the result of `table` for this layer.
            heads, layer: number of heads of the layer, and number of the layer.
        """
        return None

    @abc.abstractmethod
    def choose(self, held: HeldLayer, count: Array) -> Array:
        """Returns a mask of the tokens of a layer to keep, `bool[G, S]`: `count` (`i32[]`) tokens of each head."""

    def choose_all(self, held: Sequence[HeldLayer], counts: Sequence[Array]) -> Sequence[Array]:
        """Returns a mask of the tokens to keep for each layer, `bool[G, S]`. It is called in place of `choose` if
        `compares` is True, for rules that compare layers. By default each layer chooses by itself.

        Args:
            held: the cached entries of each layer.
            counts: `i32[]` for each layer, number of tokens that each head keeps.
        """
        return [self.choose(own, count) for own, count in zip(held, counts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Top(Selection):
    """Keeps the tokens of each head with the highest scores."""

    score: TokenScore

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return best(self.score(held), held.valid, count)


@functools.lru_cache(maxsize=32)
def tables(selection: Selection, budget: Budget | tuple[Budget, ...], longest: int, depth: int) -> Sequence[np.ndarray]:
    """Returns for each of `depth` layers the numbers of tokens to keep (`Selection.table`); layers with equal tables
    share one array.

    Raises:
        ValueError: `budget` is a tuple for another number of layers.
    """
    if isinstance(budget, tuple) and len(budget) != depth:
        raise ValueError(f"budget: got one for each of {len(budget)} layers, the model has {depth}")
    found: list[np.ndarray] = []
    for layer in range(depth):
        own = selection.table(budget[layer] if isinstance(budget, tuple) else budget, longest, layer, depth)
        found.append(next((t for t in found if np.array_equal(t, own)), own))
    return found
