"""The decoding state: everything that one request batch carries from round to round."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache
from decodax.core.record import Record

PyTree = Any


class Status(enum.IntEnum):
    """Why a row is finished, or that it is not."""

    RUNNING = 0
    EOS = 1          # the model ended it
    STOP = 2         # a stop string was completed; or the constraint's text, where there is no end of sequence
    LENGTH = 3       # max_new_tokens reached
    CAPACITY = 4     # the token buffer or the cache is full
    INVALID = 5      # the model's logits held a NaN or +inf
    DEAD_END = 6     # the policy forbids every token
    TIME = 7         # the caller's time ran out; set by the host, between rounds


@struct
class Stats(Struct):
    """Counters of each row, for the rounds in which it was running. Definitions as in vLLM.

    Attributes:
        rounds: `i32[B]` target forwards that the row took part in.
        drafted, accepted: `i32[B]` draft tokens offered and accepted, before a stop cut the round short.
        histogram: `i32[B, M + 1]` rounds by number of tokens decided in them, before such a cut.
        waited: `i32[B]` target forwards of the batch that the running row sat out. With `rounds` they are the batch's,
            of the row that runs longest.
    """

    rounds: Array
    drafted: Array
    accepted: Array
    histogram: Array
    waited: Array


@struct
class State(Struct):
    """One batch of requests in the middle of decoding.

    What evolves:
        tokens: `i32[B, N + M]` prompt, then output; entries at and beyond `length` mean nothing.
        length: `i32[B]` tokens of the row. The newest one is not in the cache yet: it opens the next window.
        cache: verified keys and values.
        algo, policy, stop: state of the algorithm, of the policy's transforms, and of the stop automaton `i32[B]`.
        record: log-probabilities of the tokens, by position, or None if nobody asked.
        status: `i32[B]`, a `Status`.
    What counts:
        stats.
    What bounds (never changes):
        prompt_length, min_new, max_length: `i32[B]`; an end of sequence counts only after `min_new` tokens.
        key: `key[B]`, the row's address for every draw.
    """

    tokens: Array
    length: Array
    cache: Cache
    algo: PyTree
    policy: PyTree
    stop: Array
    record: Record | None
    status: Array
    stats: Stats
    prompt_length: Array
    min_new: Array
    max_length: Array
    key: Array

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def running(self) -> Array:
        """`bool[B]`."""
        return self.status == Status.RUNNING

    @property
    def newest(self) -> Array:
        """`i32[B]`: the last token of each row."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, 1)[:, 0]

    def select(self, rows: Array) -> State:
        """The state whose row `i` is this one's row `rows[i]` (`i32[B']`): samples of one prompt, beams, particles."""
        cache = self.cache.select(rows)
        rest = jax.tree.map(lambda x: x[rows], self.replace(cache=None))
        return rest.replace(cache=cache)

    def succeed(self, rows: Array) -> State:
        """The state whose row `i` goes on from what row `rows[i]` was; see `Decision.rows`."""
        moved = jax.tree.map(lambda x: x[rows], self.replace(cache=None, algo=None, stats=None))
        return moved.replace(cache=self.cache.select(rows), key=self.key, prompt_length=self.prompt_length,
                             min_new=self.min_new, max_length=self.max_length, stats=self.stats, algo=self.algo)
