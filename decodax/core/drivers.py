"""The compiled drivers: begin, prefill, and advance a state by rounds. Everything above them is host code.

Two programs for each algorithm, kind of policy, batch and buffer size, `begin` and `advance`; and one for each model,
batch and buffer size that prefills, which all algorithms share that learn the same of a prompt (most learn nothing).
Prompts, temperatures, seeds, stops and budgets are data. States are donated from call to call, so a caller keeps only
the newest one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Cache
from decodax.core.prefill import Prefill, Silent, prefill_rounds
from decodax.core.round import run
from decodax.core.start import init_state
from decodax.core.state import State, Stats
from decodax.core.types import Algorithm, Model, Observer, Params

begin = jax.jit(init_state, static_argnums=(0, 1), static_argnames=("size", "top_logprobs"))
"""`init_state`, compiled."""


def prefill(alg: Algorithm, model: Model, params: Params, s: State, *, width: int) -> State:
    """Commits all but the newest prompt token to the cache, in chunks of `width` (at most the buffer's size).

    The program sees neither the policy nor, unless it learns from the prompt (`Algorithm.observer`), the algorithm: it
    is shared by all of them.
    """
    if not alg.prefills:
        return s
    observer = alg.observer
    seen = s.replace(cache=None, algo=None, policy=None, record=None, stats=None)
    if observer is None:        # neither its weights nor the room that its rounds want behind the text
        seen, params = seen.replace(tokens=s.tokens[:, :s.cache.capacity]), params.replace(draft=None)
    held = s.cache, None if observer is None else s.algo
    (cache, algo), status = commit_prompts(observer, model, params, held, seen, width=width)
    return s.replace(cache=cache, algo=s.algo if observer is None else algo, status=status)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("width",), donate_argnums=(3,))
def commit_prompts(observer: Observer | None, model: Model, params: Params, held: tuple[Cache, Any], s: State, *,
                   width: int) -> tuple[tuple[Cache, Any], Array]:
    """The program behind `prefill`.

    Args:
        held: the cache, and the algorithm's state if there is an observer; donated.
        s: the state without them, and without policy, record and statistics.

    Returns:
        `held` behind the prompts, and the rows' status.
    """
    chunks, none = Prefill(observer, width), jnp.zeros(s.batch, jnp.int32)
    # room behind the text, so that no row counts as full or done: that is for the rounds that emit tokens
    room = ((0, 0), (0, 2 if observer is None else 0))
    s = s.replace(tokens=jnp.pad(s.tokens, room), max_length=jnp.full_like(s.max_length, jnp.iinfo(jnp.int32).max),
                  cache=held[0], algo=held[1], stats=Stats(none, none, none, jnp.zeros((s.batch, 2), jnp.int32), none))
    done = run(chunks, model, params, Silent(jnp.zeros((s.batch, 0), jnp.int32)),
               s.replace(algo=chunks.init(params, s)), prefill_rounds(s.prompt_length, width))
    return (done.cache, done.algo[0]), done.status


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
