"""The compiled drivers: begin, prefill, and advance a state by rounds. Everything above them is host code.

Three programs for each algorithm, model, batch and buffer size; prompts, temperatures, seeds, stops and budgets are
data. States are donated from call to call, so a caller keeps only the newest one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.prefill import Prefill, Silent, prefill_rounds
from decodax.core.round import run
from decodax.core.start import init_state
from decodax.core.state import State
from decodax.core.types import Algorithm, Model, Params

begin = jax.jit(init_state, static_argnums=(0, 1), static_argnames=("size", "top_logprobs"))
"""`init_state`, compiled."""


def prefill(alg: Algorithm, model: Model, params: Params, s: State, *, width: int) -> State:
    """Commits all but the newest prompt token to the cache, in chunks of `width` (at most the buffer's size).

    The program does not see the policy: it is shared by all of them.
    """
    if not alg.prefills:
        return s
    done = commit_prompts(alg, model, params, s.replace(policy=None, record=None), width=width)
    return done.replace(policy=s.policy, record=s.record)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("width",), donate_argnums=(3,))
def commit_prompts(alg: Algorithm, model: Model, params: Params, s: State, *, width: int) -> State:
    """The program behind `prefill`, for a state without policy and record."""
    chunks = Prefill(alg, width)
    done = run(chunks, model, params, Silent(jnp.zeros((s.batch, 0), jnp.int32)),
               s.replace(algo=chunks.init(params, s)), prefill_rounds(s.prompt_length, width))
    return done.replace(algo=done.algo[0], stats=jax.tree.map(jnp.zeros_like, done.stats))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def advance(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array) -> State:
    """Runs until all rows have finished, `max_rounds` rounds at most. Pass `max_rounds` as an `i32[]` array."""
    return run(alg, model, params, policy, s, max_rounds)


@jax.jit
def fan_out(s: State, policy: Any, keys: Array) -> State:
    """Each prefilled row several times, side by side: with the keys `key[B * n]` and the policy of its samples."""
    rows = jnp.repeat(jnp.arange(s.batch), keys.shape[0] // s.batch)
    s = s.select(rows).replace(key=keys)
    return s.replace(policy=policy.init(s.tokens, s.length, s.prompt_length, keys))
