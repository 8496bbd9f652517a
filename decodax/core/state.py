"""The decoding state: everything that a batch of requests carries from round to round."""

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
    """Reason why a row has finished, or RUNNING."""

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
        rounds: `i32[B]`, forward passes of the target that the row took part in.
        drafted: `i32[B]`, draft tokens that were verified.
        accepted: `i32[B]`, draft tokens that were accepted, including those that a stop then cut off.
        histogram: `i32[B, M + 1]`, number of rounds by the number of tokens decided in them, before such a cut.
        waited: `i32[B]`, forward passes of the target that the running row took no part in. For the row that runs
            longest, `rounds + waited` is the number of forward passes of the batch.
    """

    rounds: Array
    drafted: Array
    accepted: Array
    histogram: Array
    waited: Array


@struct
class State(Struct):
    """The state of one batch of requests during decoding.

    Changes from round to round:
        tokens: `i32[B, N + M]`, prompt, then output; values from index `length` on are undefined.
        length: `i32[B]`, number of tokens of the row. The newest one is not in the cache yet: it opens the next window.
        cache: entries of verified tokens, such as keys and values.
        algo: state of the algorithm.
        policy: state of the policy's transforms.
        stop: `i32[B]`, state of the stop automaton.
        record: log-probabilities of the tokens, by position; None if they were not requested.
        status: `i32[B]`, a `Status`.
        stats: counters.
    Constant:
        prompt_length: `i32[B]`, number of prompt tokens.
        min_new: `i32[B]`, number of new tokens before which an end of sequence or a stop string does not count.
        max_length: `i32[B]`, largest number of tokens, prompt included.
        key: `key[B]`, the row's key, from which the key of every draw is derived.
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
        """`bool[B]`, True for rows that have not finished."""
        return self.status == Status.RUNNING

    @property
    def newest(self) -> Array:
        """The last token of each row, `i32[B]`."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, 1)[:, 0]

    def select(self, rows: Array) -> State:
        """Returns the state whose row `i` is row `rows[i]` of this one (`i32[B']`), for samples of one prompt, beams or
        particles."""
        cache = self.cache.select(rows)
        rest = jax.tree.map(lambda x: x[rows], self.replace(cache=None))
        return rest.replace(cache=cache)

    def succeed(self, rows: Array) -> State:
        """Returns the state whose row `i` continues the text of row `rows[i]`. Its key, bounds, counters and algorithm
        state stay those of row `i`; see `Decision.rows`."""
        moved = jax.tree.map(lambda x: x[rows], self.replace(cache=None, algo=None, stats=None))
        return moved.replace(cache=self.cache.select(rows), key=self.key, prompt_length=self.prompt_length,
                             min_new=self.min_new, max_length=self.max_length, stats=self.stats, algo=self.algo)
