"""Times decoding rounds of a model without its prefill, and the bare loops that they consist of."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.plain import Autoregressive
from decodax.bench.timing import Times, seconds
from decodax.core import drivers
from decodax.core.types import Params, embeddings, logits_of
from decodax.core.window import causal
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sampling.draw import first_argmax

PROMPT = 32
"""Tokens of the prompts."""

Timed = Callable[[], float]
size_of = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))


def read_speed(megabytes: int = 512) -> float:
    """Returns the GB/s at which all cores of this machine read memory."""
    parts = np.array_split(_ones(megabytes), os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(len, parts))      # starts the threads
        return megabytes * 2**20 / seconds(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))() / 1e9


@functools.cache
def _ones(megabytes: int) -> np.ndarray:
    return np.ones(megabytes << 18, np.float32)


class Rounds:
    """Decoding of a model, timed without its prefill, in milliseconds.

    Attributes:
        new: number of new tokens. lowest: lowest token id of the prompts. tokens: of the last run, `i32[B, new]`.
    """

    def __init__(self, model: Transformer, params: Params, new: int, lowest: int = 0):
        self.model, self.params, self.new, self.lowest = model, params, new, lowest
        self.vocab = model.config.vocab
        self.tokens = np.zeros((0, new), np.int32)

    def prompts(self, batch: int) -> np.ndarray:
        """Returns random prompts `i32[batch, PROMPT]`."""
        return np.random.default_rng(0).integers(self.lowest, self.vocab, (batch, PROMPT)).astype(np.int32)

    def begin(self, alg: Any, batch: int, size: int, new: int, **policy: Any) -> Any:
        """Returns the sampling policy and the decoding state after the prefill of random prompts. `size` is the number
        of cache slots of a row, `new` the number of new tokens; `policy` are options of `sampling.build`."""
        tokens = np.zeros((batch, size), np.int32)
        tokens[:, :PROMPT] = self.prompts(batch)
        chain = build(batch, vocab_size=self.vocab, **policy)
        s = drivers.begin(alg, self.model, self.params, chain, tokens, np.full(batch, PROMPT, np.int32),
                          size=size, max_new=np.int32(new), seed=np.uint32(0))
        return chain, drivers.prefill(alg, self.model, self.params, s, width=32)

    def decode(self, batch: int, size: int = 256, alg: Any = None, by: str = "round", **policy: Any) -> Timed:
        """Returns a function that decodes once and returns the milliseconds of a "round", or of a new "token" of a row,
        as `by` says. `size` is the number of cache slots of a row; `alg` None is plain decoding."""
        alg = alg or Autoregressive()

        def timed() -> float:
            chain, s = jax.block_until_ready(self.begin(alg, batch, size, self.new, **policy))
            clock = time.perf_counter()
            s = jax.block_until_ready(drivers.advance(alg, self.model, self.params, chain, s, jnp.int32(10**6)))
            spent = time.perf_counter() - clock
            self.tokens = np.asarray(s.tokens)[:, PROMPT:PROMPT + self.new]
            return 1e3 * spent / (int(s.stats.rounds.max()) if by == "round" else self.new)

        return timed

    def bare(self, batch: int, width: int = 1, size: int = 256) -> Timed:
        """Returns a function that times the least that a round can do, in milliseconds: a loop that runs the model on
        `width` tokens, takes an argmax and adds one token to the cache."""
        def timed() -> float:
            _, s = self.begin(Autoregressive(), batch, size, self.new)
            args = (self.params.target, s.newest, s.length - 1, s.cache, jnp.int32(self.new))
            jax.block_until_ready(args)
            return seconds(lambda: jax.block_until_ready(_bare(self.model, width, *args)))() / self.new * 1e3

        return timed

    def bare_head(self, head: Any, batch: int, width: int, size: int = 256) -> Timed:
        """Returns a function that times a loop of a trained drafter head alone, in milliseconds a round: each runs it
        on `width` inputs, takes an argmax and adds their keys and values to its cache."""
        def timed() -> float:
            _, s = self.begin(Autoregressive(), batch, size, self.new)
            cache = head.init_cache(batch, size, jnp.float32)
            args = (self.params, s.newest, s.length - 1, cache, jnp.int32(self.new))
            jax.block_until_ready(args)
            return seconds(lambda: jax.block_until_ready(_bare_head(self.model, head, width, *args)))() / self.new * 1e3

        return timed

    def bandwidth(self, spent: Times, side: str, batch: int = 1) -> tuple[float, str]:
        """Returns the share of the machine's read bandwidth that a side reaches, and both bandwidths as text.

        A round has to read the weights, an embedding table only if it is also the head, and the live share of the slots
        of the cache. `spent` has milliseconds a round of the side, and under "read" results of `read_speed` that were
        taken in turn with them.
        """
        weights, cache = self.params.target, self.begin(Autoregressive(), batch, 256, self.new)[1].cache
        table = size_of(weights["embed"]) if "lm_head" in weights else 0
        read = int(size_of(weights) - table + (PROMPT + self.new / 2) / 256 * size_of(cache))
        own, machine = read / min(spent[side]) / 1e6, max(spent["read"])
        return own / machine, f"{own:.1f} of {machine:.1f} GB/s"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _bare(model: Transformer, width: int, params: Any, token: Array, length: Array, cache: Any, rounds: Array) -> Any:
    def body(carry: Any) -> Any:
        i, token, length, cache = carry
        out = model.apply(params, causal(jnp.repeat(token[:, None], width, 1), length), cache)
        token = first_argmax(out.logits()[:, 0])
        slots = jnp.where((token >= 0)[:, None] & (jnp.arange(width) == 0), length[:, None], -1)
        return i + 1, token, length + 1, cache.commit(out.entries, slots)

    return lax.while_loop(lambda c: c[0] < rounds, body, (jnp.int32(0), token, length, cache))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _bare_head(model: Transformer, head: Any, width: int, params: Params, token: Array, length: Array, cache: Any,
               rounds: Array) -> Any:
    weights, taps = params.draft.head, max(len(head.taps), 1)

    def body(carry: Any) -> Any:
        i, token, length, cache, state = carry
        pairs = causal(jnp.repeat(token[:, None], width, 1), length)
        if width > 1:               # verified tokens, whose states come from the target's features
            features = jnp.broadcast_to(state[:, :1, :1], (*pairs.tokens.shape, taps * head.tap_width))
            state = head.enter(weights, features)
        step = head.step(weights, pairs.tokens, lambda x: embeddings(model, params.target, x), state, pairs.positions,
                         0, lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, pairs, **options))
        logits = head.logits(weights, step.hidden[:, -1:], 0, lambda x: logits_of(model, params.target, x))
        return (i + 1, first_argmax(logits[:, 0]), length + 1, cache.commit(step.entries, pairs.positions),
                step.state[:, :width])

    state = jnp.zeros((len(token), width, head.state_width))
    return lax.while_loop(lambda c: c[0] < rounds, body, (jnp.int32(0), token, length, cache, state))
