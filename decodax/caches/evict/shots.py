"""Whole examples of a prompt stay or go, and of the tokens behind it single ones (ShotKV: "Can LLMs Maintain
Fundamental Abilities under KV Cache Compression?", Liu et al., 2025).

A prompt is cut behind each separator. An example is worth the mean over its tokens of the attention that they receive,
added up over the heads of all layers, and stays or goes in all of them. Examples stay in the order of what they are
worth, as long as they fit into the budget; one that does not fit is passed over. While decoding the prompt's tokens
stay, and of those behind it `pool`, by their attention in the same sum.

The paper leaves open which queries pay that attention, and how often tokens go; here it is the latest `window`
queries, and each `every` tokens. The examples in which the latest `window` tokens are come first, since the question is
there. If the last of them alone does not fit, the latest tokens stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Evicting
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.marks import Marks, marked, spelling
from decodax.caches.evict.scores import Gathered, TokenScore
from decodax.caches.evict.selection import Selection, best
from decodax.core.cache import ReadPrompt


@dataclasses.dataclass(frozen=True)
class ShotAttention(TokenScore):
    """The attention that the latest queries pay to a token, added up over heads; and which example it is in, the first
    one 0 (`Gathered.slots`).

    Attributes:
        window: the latest queries.
        separator: what an example ends with; None: a blank line, as the tokenizer writes it.
    """

    window: int = 32
    separator: Marks | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, takes 1 or more")

    @property
    def latest(self) -> int:
        return self.window

    @property
    def always(self) -> int:
        return self.window

    def of_model(self, lm: Any) -> ShotAttention:
        if self.separator is not None or lm.tokenizer is None:
            return self
        return dataclasses.replace(self, separator=spelling(lm, b"\n\n"))

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), jnp.int32))

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        if self.separator is None:
            raise ValueError("separator: got None; a model without a tokenizer, or a kind of cache that was set by "
                             "hand, takes the token ids that an example ends with")
        cuts = (marked(prompt.tokens, self.separator) > 0).astype(jnp.int32)
        number = jnp.cumsum(cuts, 1) - cuts
        each = jax.vmap(lambda number, at: number[jnp.clip(at, 0, len(number) - 1)])
        return [own.replace(slots=each(number, at)) for own, at in zip(cache.gathered, cache.positions, strict=True)]

    def __call__(self, held: HeldLayer) -> Array:
        paid = held.attention().sum((0, 1, 2))
        return jnp.broadcast_to(paid, held.valid.shape)


@dataclasses.dataclass(frozen=True)
class Shots(Selection):
    """Whole examples of a prompt, the same ones in all heads of all layers, and tokens behind it.

    Attributes:
        pool: how many of the tokens behind the prompt stay, the latest `score.window` among them.
    """

    score: ShotAttention
    pool: int = 512

    compares = True

    def __post_init__(self) -> None:
        if self.pool <= self.score.window:
            raise ValueError(f"pool: got {self.pool}, takes more than the {self.score.window} latest tokens")

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) + self.pool

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return self.choose_all([held], [count])[0]

    def choose_all(self, held: Sequence[HeldLayer], counts: Sequence[Array]) -> Sequence[Array]:
        one = held[0]       # all heads of all layers hold the same tokens
        worth = sum((self.score(own)[0] for own in held), jnp.zeros(one.slots, jnp.float32))
        valid, slot, number = one.valid[0], one.index[0], one.count[0]
        late = slot >= number - self.score.window
        later = valid & (one.positions[0] >= one.settled_at)
        pool = later & best(jnp.where(later, jnp.where(late, jnp.inf, worth), -1)[None], valid[None],
                            jnp.asarray(self.pool))[0]
        chosen = jnp.where(one.length > one.settled_at, pool | (valid & ~later),
                           _examples(worth, one.gathered.slots[0], valid, late, counts[0], number))
        return [jnp.broadcast_to(chosen, own.valid.shape) for own in held]


def _examples(worth: Array, example: Array, valid: Array, late: Array, count: Array, number: Array) -> Array:
    """`bool[S]`: what stays of a prompt of `number` tokens, `count` at most; `example` (`i32[S]`) is which one each
    token is in, and those with a `late` token come first, the last one before the others."""
    S = len(worth)
    of = jnp.where(valid, example, S)
    total = lambda x: jax.ops.segment_sum(x.astype(jnp.float32), of, S + 1)[:S]
    size = total(valid)
    mean = jnp.where(size > 0, total(worth) / jnp.maximum(size, 1), -jnp.inf)
    first = total(late & valid) > 0
    order = jnp.lexsort((jnp.where(first, -jnp.arange(S, dtype=jnp.float32), -mean), ~first))

    def take(left: Array, at: Array) -> tuple[Array, Array]:
        fits = (size[at] > 0) & (size[at] <= left)
        return left - jnp.where(fits, size[at], 0), fits

    _, fits = lax.scan(take, count.astype(jnp.float32), order)
    stays = jnp.zeros(S + 1, bool).at[order].set(fits)[of]
    newest = jnp.maximum(number - 1, 0)
    return valid & jnp.where(stays[newest], stays, jnp.arange(S) >= number - count)
