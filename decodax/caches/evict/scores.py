"""The contract of a score: a number for each cached token that says how much it is worth keeping.

A score gets one layer of one row (`HeldLayer`) when tokens have to be evicted. The tokens with the highest scores are
kept, and of equal ones the newer. Tokens with an infinite score are kept before all others.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.common.options import Checked
from decodax.common.struct import Struct, static, struct
from decodax.core.capabilities import ReadPrompt


@struct
class HeldLayer(Struct):
    """The cached entries of one layer of one row, in the order of their positions and without gaps.

    Attributes:
        keys, values: `f32[G, S, d]` and `f32[G, S, e]`; keys are rotated to their positions.
        positions: `i32[G, S]`, position of the token in each slot.
        count: `i32[G]`, number of filled slots of each head.
        length: `i32[]`, number of tokens of the text so far.
        prompt_length: `i32[]`, length of the text at the first eviction, after prefill.
        since: `i32[]`, length of the text at the previous eviction; equal to `length` at the first one.
        queries: `f32[w, H, d]`, the latest `w` queries, the newest last, rotated and scaled for attention. If the text
            is shorter, the first ones are zeros.
        gathered: statistics that the score has gathered of this row (`TokenScore.gather`).
        outputs: `f32[H, e, D]`, the output projection of each head; None unless the selection sets `projects`.
        layer: static; number of this layer.
        depth: static; number of layers.
        shape: static; shape of this layer.
    """

    keys: Array
    values: Array
    positions: Array
    count: Array
    length: Array
    prompt_length: Array
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
        """Number of each slot from 0 to `S - 1`, `i32[1, S]`, to compare with counts of slots."""
        return jnp.arange(self.slots, dtype=jnp.int32)[None]

    @property
    def valid(self) -> Array:
        """True for the filled slots, `bool[G, S]`."""
        return self.index < self.count[:, None]

    @property
    def asked_at(self) -> Array:
        """Positions of `queries`, `i32[w]`; negative for queries before the beginning of the text."""
        return self.length - self.queries.shape[0] + jnp.arange(self.queries.shape[0], dtype=jnp.int32)

    def attention(self, queries: Array | None = None, asked_at: Array | None = None) -> Array:
        """Returns the attention weights of queries on the cached tokens, `f32[G, r, w, S]`, with `r = H / G`.

        Each query attends to the tokens up to its own position.

        Args:
            queries: `f32[w, H, d]`, rotated and scaled. None: the latest ones, `self.queries`.
            asked_at: `i32[w]`, positions of the queries. None: those of the latest queries.
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
        queries: `f[B, W, H, d]`, scaled for attention.
        sums: `f32[B, W, H]`, logarithm of the softmax sum of each query.
        positions: `i32[B, W]`; -1 for nodes that were not committed.
        kv: `f[B, G, S, d + e]`, keys and values of the layer, including these tokens.
        held: `i32[B, G, S]`, position of the token in each slot, including these tokens.
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
        slots: arrays `[B, G, S]` with a value for each slot, which move with the tokens.
        rest: arrays `[B, ...]`.
    """

    slots: Any = None
    rest: Any = None


class TokenScore(Checked, abc.ABC):
    """Base of scores, which say how much each cached token is worth keeping. Derive a frozen dataclass, which is static
    under jit.

    Attributes:
        reads: the input that `gather` needs. "nothing": it is not called. "queries": it gets all queries. "attention":
            during prefill, it gets all queries with their softmax sums; later queries are in `HeldLayer.queries`.
        once: True if the score is defined after prefill only, not while decoding.
        latents: True if the score is defined for keys that are values, too (`KVLayer.value_width`).
    """

    reads: ClassVar[Literal["nothing", "queries", "attention"]] = "nothing"
    once: ClassVar[bool] = False
    latents: ClassVar[bool] = False

    @property
    def latest(self) -> int:
        """Number of latest queries that the cache stores for the score (`HeldLayer.queries`). By default 0."""
        return 0

    @property
    def always(self) -> int:
        """Number of tokens of each head that are kept whatever their scores, such as the first or the latest ones. A
        budget must be larger. By default 0."""
        return 0

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        """Returns the initial statistics of a layer without tokens; by default none.

        Args:
            shape: shape of the layer.
            batch: number of rows.
            slots: number of slots of each head.
        """
        return Gathered()

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        """Returns the statistics of a layer, updated for newly committed tokens. By default `gathered` itself.

        Args:
            shape: shape of the layer.
            gathered: the statistics before.
            new: queries, keys and values of the new tokens.
        """
        return gathered

    def check(self, shapes: Sequence[KVLayer]) -> None:
        """Raises ValueError if the options are missing something, or do not fit a model whose layers have these
        shapes. Called when a cache is made."""

    def consult(self, cache: Any, prompt: ReadPrompt) -> Sequence[Gathered]:
        """Returns the statistics of all layers after prefill, before the first eviction. By default those in `cache`.

        A score that runs the model once more on the prompt, or on text after it, overrides this.

        Args:
            cache: an `Evicting` with all tokens of the prompt.
            prompt: the prompt, and the model that has prefilled it.
        """
        gathered: Sequence[Gathered] = cache.gathered
        return gathered

    def of_model(self, lm: Any) -> TokenScore:
        """Returns the score with data that it needs from a loaded model `lm` (a `decodax.LM`), such as the end tokens.
        By default the score itself."""
        return self

    def beyond(self, longest: int) -> int:
        """Returns the number of extra positions that `consult` runs the model on after a prompt of `longest` tokens,
        for which memory is needed. By default 0."""
        return 0

    def renew(self, held: HeldLayer) -> Any:
        """Returns the statistics of the slots (`Gathered.slots`) with the queries since the previous eviction included,
        just before a new one. By default those of `held`."""
        return held.gathered.slots

    @abc.abstractmethod
    def __call__(self, held: HeldLayer) -> Array:
        """Returns the score of each slot, `f32[G, S]`; the scores of empty slots are ignored."""


def unit(x: Array) -> Array:
    """Normalizes vectors to length 1."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def by_slot(cache: Any, values: Array) -> Sequence[Gathered]:
    """Returns the statistics of all layers, with one number for each cached token in `Gathered.slots`.

    Args:
        cache: an `Evicting`, whose `gathered` supplies the other statistics.
        values: `[B, N]`, the number for each token of the text, by position. Empty slots get 0.
    """
    each = jax.vmap(lambda values, at: jnp.where(at >= 0, values[jnp.clip(at, 0, len(values) - 1)], 0))
    return [own.replace(slots=each(values, at).astype(values.dtype))
            for own, at in zip(cache.gathered, cache.positions, strict=True)]
