"""ShotKV: keeps or evicts whole examples of a prompt, and single tokens after it ("Can LLMs Maintain Fundamental
Abilities under KV Cache Compression?", Liu et al., 2025).

A prompt is cut into examples, each ending with a separator. The score of an example is the mean over its tokens of the
attention that they receive, summed over the heads of all layers, and all layers keep the same examples. Examples are
kept in the order of their scores if they fit into the rest of the budget; one that does not fit is skipped. While
decoding, these tokens are kept, and of the tokens after the prompt a pool, by the same attention.

The paper does not say which queries count and how often tokens are evicted. Here the latest queries count, and tokens
are evicted every `every` tokens. The examples of the latest tokens are kept first, since they contain the question. If
the last example alone does not fit, the latest tokens are kept instead.

No code is public. While decoding, a number of tokens is kept; in the paper it is a share.
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
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.scores import Gathered, HeldLayer, TokenScore, by_slot
from decodax.caches.evict.selection import Budget, Selection, best
from decodax.caches.evict.text.marks import Marks, marked, read_marks, spelling
from decodax.common.options import Count
from decodax.common.registry import CACHES
from decodax.core.capabilities import ReadPrompt


@dataclasses.dataclass(frozen=True)
class ShotAttention(TokenScore):
    """Scores a token by the attention of the latest queries, summed over heads. `Gathered.slots` is the number of the
    example that each token belongs to.

    Attributes:
        window_size: number of latest queries; their own tokens are kept.
        separator: marks that end an example. None: a blank line, as the tokenizer encodes it.
    """

    window_size: Count = 32
    separator: Marks | None = None

    @property
    def latest(self) -> int:
        return self.window_size

    @property
    def always(self) -> int:
        return self.window_size

    def of_model(self, lm: Any) -> ShotAttention:
        if self.separator is not None or lm.tokenizer is None:
            return self
        return dataclasses.replace(self, separator=spelling(lm, b"\n\n"))

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), jnp.int32))

    def check(self, shapes: Sequence[KVLayer]) -> None:
        if self.separator is None:
            raise ValueError("separator: got None; a model without a tokenizer, or a cache that was not given to "
                             "generate, takes the token ids that an example ends with")

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        assert self.separator is not None
        cuts = (marked(prompt.tokens, self.separator) > 0).astype(jnp.int32)
        number = jnp.cumsum(cuts, 1) - cuts
        return by_slot(cache, number)

    def __call__(self, held: HeldLayer) -> Array:
        paid = held.attention().sum((0, 1, 2))
        return jnp.broadcast_to(paid, held.valid.shape)


@dataclasses.dataclass(frozen=True)
class Shots(Selection):
    """Keeps whole examples of a prompt, the same ones in all heads of all layers, and `pool` of the tokens after it:
    the latest ones and those of highest score.

    Attributes:
        score: score of the tokens.
        pool: number of tokens after the prompt to keep, including the latest `score.window_size`.
    """

    score: ShotAttention
    pool: Count = 512

    compares = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool <= self.score.window_size:
            raise ValueError(f"pool: got {self.pool}, takes more than the {self.score.window_size} latest tokens")

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) + self.pool

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return self.choose_all([held], [count])[0]

    def choose_all(self, held: Sequence[HeldLayer], counts: Sequence[Array]) -> Sequence[Array]:
        one = held[0]       # all heads of all layers hold the same tokens
        worth = sum((self.score(own)[0] for own in held), jnp.zeros(one.slots, jnp.float32))
        valid, slot, number = one.valid[0], one.index[0], one.count[0]
        late = slot >= number - self.score.window_size
        later = valid & (one.positions[0] >= one.prompt_length)
        pool = later & best(jnp.where(later, jnp.where(late, jnp.inf, worth), -1)[None], valid[None],
                            jnp.asarray(self.pool))[0]
        chosen = jnp.where(one.length > one.prompt_length, pool | (valid & ~later),
                           kept_examples(worth, one.gathered.slots[0], valid, late, counts[0], number))
        return [jnp.broadcast_to(chosen, own.valid.shape) for own in held]


def kept_examples(worth: Array, example: Array, valid: Array, late: Array, count: Array, number: Array) -> Array:
    """Returns a mask of the tokens of a prompt to keep, `bool[S]`.

    Args:
        worth: `f32[S]`, scores of the tokens.
        example: `i32[S]`, number of the example of each token.
        valid: `bool[S]`, the filled slots.
        late: `bool[S]`, the latest tokens. Examples with one of them are kept first, the last one before the others.
        count: `i32[]`, maximum number of tokens to keep.
        number: `i32[]`, number of tokens of the prompt.
    """
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


@CACHES.register("shotkv", "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?", "Liu et al. 2025",
                 family="evict")
def shotkv(budget: Budget = 2048, pool: Count = 512, every: Count = 32, window_size: Count = 32,
           separator: Any = None) -> Eviction:
    """Keeps whole examples of a prompt, by the mean attention to their tokens, and a pool of the tokens after it.

    For prompts that consist of examples or facts: each is kept or evicted as a whole, in all heads and layers.

    Args:
        budget: tokens of the prompt that each head keeps; below 1, a share of it; or bytes such as "64MB".
        pool: number of tokens after the prompt to keep, including the latest `window_size`.
        every: tokens between evictions while decoding.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        separator: token id that ends an example, or a tuple of ids and of tuples of ids (sequences). None: a blank
            line, as the tokenizer encodes it.
    """
    marks = None if separator is None else read_marks(separator, "separator")
    return Eviction(Shots(ShotAttention(window_size, marks), pool), budget, every, name="shotkv")
