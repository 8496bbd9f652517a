"""The contract of a score: how much each cached token is worth keeping.

A score sees one layer of one row (`HeldLayer`) at the moment when tokens have to be evicted. The tokens with the
highest scores stay, the newer one where two tie; tokens with an infinite score stay before all others.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.common.options import check_options
from decodax.common.struct import Struct, static, struct
from decodax.core.capabilities import ReadPrompt


@struct
class HeldLayer(Struct):
    """The cached entries of one layer of one row, in the order of their positions and without gaps.

    Attributes:
        keys, values: `f32[G, S, d]` and `f32[G, S, e]`; keys are rotated to their positions.
        positions: `i32[G, S]`. count: `i32[G]`, the number of filled slots of each head.
        length: `i32[]`, the number of tokens of the text so far.
        settled_at: `i32[]`, the length of the text when the cache first evicted, after the prompt.
        since: `i32[]`, the length at the last eviction; the current length when a prompt has just been read.
        queries: `f32[w, H, d]`, the latest `w` queries, the newest last, rotated and scaled as attention takes them.
            The first ones are zeros if the text is shorter.
        gathered: statistics that the score has gathered of this row (`TokenScore.gather`).
        outputs: `f32[H, e, D]`, the output projection of each head, for selections that read it; else None.
        layer, depth: number of this layer, and of layers. shape: shape of the layer.
    """

    keys: Array
    values: Array
    positions: Array
    count: Array
    length: Array
    settled_at: Array
    since: Array
    queries: Array
    gathered: Any
    outputs: Array | None
    layer: int = static()
    depth: int = static()
    shape: KVLayer = static()

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def index(self) -> Array:
        """Number of each slot, `i32[1, S]`."""
        return jnp.arange(self.slots, dtype=jnp.int32)[None]

    @property
    def valid(self) -> Array:
        """True for the filled slots, `bool[G, S]`."""
        return self.index < self.count[:, None]

    @property
    def asked_at(self) -> Array:
        """Positions of `queries`, `i32[w]`; negative where there is no query."""
        return self.length - self.queries.shape[0] + jnp.arange(self.queries.shape[0], dtype=jnp.int32)

    def attention(self, queries: Array | None = None, asked_at: Array | None = None) -> Array:
        """Returns the attention weights of queries on the cached tokens, `f32[G, r, w, S]`.

        Each query attends to the tokens up to its own position.

        Args:
            queries, asked_at: `f32[w, H, d]` and their positions `i32[w]`. Default: the latest ones.
        """
        queries = self.queries if queries is None else queries
        asked_at = self.asked_at if asked_at is None else asked_at
        w, H, d = queries.shape
        G = self.keys.shape[0]
        scores = jnp.einsum("wgrd,gsd->grws", queries.reshape(w, G, H // G, d), self.keys)
        seen = (self.valid[:, None] & (self.positions[:, None] <= asked_at[:, None]))[:, None]
        return jax.nn.softmax(scores, axis=-1, where=seen) * (asked_at >= 0)[:, None]


@struct
class Taken(Struct):
    """Tokens that were added to a layer, for `TokenScore.gather`.

    Attributes:
        queries: `f[B, W, H, d]`, scaled as attention takes them. sums: `f32[B, W, H]`, the logarithm of the sum of the
            exponentials of each query. positions: `i32[B, W]`, -1 for nodes that were not committed.
        kv, held: the layer's keys and values `f[B, G, S, d + e]` and positions `i32[B, G, S]`, including these tokens.
    """

    queries: Array
    sums: Array
    positions: Array
    kv: Array
    held: Array


@struct
class Gathered(Struct):
    """Statistics that a score has gathered of a layer.

    Attributes:
        slots: arrays `[B, G, S]` that move with the tokens. rest: arrays `[B, ...]`.
    """

    slots: Any = None
    rest: Any = None


class Checked:
    """Base of the frozen dataclasses that rules are made of: checks fields by their annotations.

    Raises:
        ValueError: a field of another kind or out of its range.
    """

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))


class TokenScore(Checked, abc.ABC):
    """How much each cached token is worth keeping. Derive a frozen dataclass from it, which is static under jit.

    Attributes:
        reads: the input of `gather`: "nothing"; all "queries" as they come; or the "attention" of a prompt, that is its
            queries and their softmax sums (later queries are among the latest ones).
        once: True if the score is defined after a prompt only, not while decoding.
    """

    reads: ClassVar[Literal["nothing", "queries", "attention"]] = "nothing"
    once: ClassVar[bool] = False

    @property
    def latest(self) -> int:
        """Number of latest queries that the score looks at (`HeldLayer.queries`)."""
        return 0

    @property
    def always(self) -> int:
        """Number of tokens that stay in any case; a budget must be larger."""
        return 0

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        """Returns the statistics of an empty layer."""
        return Gathered()

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        """Returns the statistics after tokens were committed."""
        return gathered

    def consult(self, cache: Any, prompt: ReadPrompt) -> Sequence[Gathered]:
        """Returns the statistics of all layers after a prompt, before the first eviction.

        Override this to run the model once more.

        Args:
            cache: an `Evicting` with the whole prompt. prompt: the prompt and the model that has read it.
        """
        gathered: Sequence[Gathered] = cache.gathered
        return gathered

    def of_model(self, lm: Any) -> TokenScore:
        """See `CacheConfig.of_model`."""
        return self

    def beyond(self, longest: int) -> int:
        """See `CacheConfig.beyond`."""
        return 0

    def renew(self, held: HeldLayer) -> Any:
        """Returns `Gathered.slots` with the queries since `HeldLayer.since` added, just before an eviction."""
        return held.gathered.slots

    @abc.abstractmethod
    def __call__(self, held: HeldLayer) -> Array:
        """Returns the score of each slot, `f32[G, S]`; empty slots do not matter."""


def unit(x: Array) -> Array:
    """Normalizes vectors to length 1."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def by_slot(cache: Any, values: Array) -> Sequence[Gathered]:
    """Returns the statistics of all layers with one value for each cached token.

    Args:
        cache: an `Evicting`. values: `[B, N]`, the value of each token of the text.
    """
    each = jax.vmap(lambda values, at: jnp.where(at >= 0, values[jnp.clip(at, 0, len(values) - 1)], 0))
    return [own.replace(slots=each(values, at).astype(values.dtype))
            for own, at in zip(cache.gathered, cache.positions, strict=True)]
