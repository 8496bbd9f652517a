"""Creates the decoding state before the first round."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.common.axes import constrain
from decodax.core import composed, keys
from decodax.core.algorithm import Algorithm, name_of
from decodax.core.around import reads_in_part
from decodax.core.cache import Cache, require
from decodax.core.capabilities import check_window, layers_read, prefill_cache
from decodax.core.mesh import auto_region, heads
from decodax.core.record import empty_record
from decodax.core.state import State, Stats, Status
from decodax.core.target import for_target
from decodax.core.types import Model, Params


def check_fit(alg: Algorithm, model: Model, cache: Cache) -> None:
    """Checks that a method, a model and its cache can be combined, by what they declare.

    The front ends call it before anything is traced, with a cache of shapes; `init_state` calls it, too, for callers of
    its own.

    Args:
        alg: the decoding method.
        model: the network as the method runs it (`Composed.wrap_model`).
        cache: its cache.

    Raises:
        ValueError: the cache lacks a feature that the method needs, takes no windows as wide as the method's, or needs
            a model that runs some of its layers during prefill; or as in `decodax.core.composed.Fitting`.
    """
    if alg.traits.caches:
        require(cache, alg.traits.needs, name_of(alg))
        check_window(cache, alg.traits.window)
    if alg.traits.prefills:
        prefill: Any = prefill_cache(cache)
        if layers_read(prefill) is not None and not reads_in_part(model):
            prefill.refuse_whole()
    composed.check_fit(alg, model, cache)


def init_state(alg: Algorithm, model: Model, params: Params, policy: Any, tokens: Array, prompt_length: Array, *,
               size: int, max_new: Array, min_new: Array | int = 0, seed: Array | int = 0,
               request: Array | None = None, sample: Array | None = None, top_logprobs: int | None = None,
               inputs: Any = None) -> State:
    """Returns the decoding state of a batch before prefill.

    Args:
        alg: the decoding method.
        model: the network.
        params: weights of the model and of the method.
        policy: the sampling policy.
        tokens: `i32[B, T]`, prompts, left-aligned.
        prompt_length: `i32[B]`, from 1 to T.
        size: static; number of slots `N` of the token buffer and of the cache, at least T. A row that reaches it ends
            with `Status.CAPACITY`, so make it at least prompt + max_new. Attention processes a cache in blocks of 128
            slots, so a size above 128 has to be a multiple of 128, as from `decodax.core.memory.bucket`.
        max_new: `i32[B]` or a scalar, largest number of new tokens; may be traced. A row with 0 is finished from the
            start.
        min_new: `i32[B]` or a scalar, number of new tokens before a row may end; may be traced.
        seed: `u32[B]` or a scalar, part of the address of the row's draws. A seed of 64 bits is a row of `u32[B, 2]`,
            high word first.
        request: `u32[B]` or a scalar, part of that address; default the index of the row.
        sample: `u32[B]` or a scalar, part of that address; default 0.
        top_logprobs: records log-probabilities of the tokens and of this number of most likely ones; None: records
            nothing.
        inputs: inputs of each row beside its tokens, a pytree of arrays `[B, ...]`; see `Model.init_cache`.

    Raises:
        ValueError: `size` is smaller than the prompt buffer; the algorithm cannot run on the network; or as in
            `check_fit`.
    """
    alg = for_target(alg, model)
    B, T = tokens.shape
    if size < T:
        raise ValueError(f"size: got {size} slots for a prompt buffer of {T} tokens")
    row = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (B,))
    seed = jnp.asarray(seed, jnp.uint32)
    bounds = (row(prompt_length, jnp.int32), row(max_new, jnp.int32), row(min_new, jnp.int32), inputs,
              seed if seed.ndim == 2 else row(seed, jnp.uint32),
              row(jnp.arange(B) if request is None else request, jnp.uint32),
              row(0 if sample is None else sample, jnp.uint32))

    def build(params: Params, policy: Any, tokens: Array, prompt_length: Array, max_new: Array, min_new: Array,
              inputs: Any, *address: Array) -> State:
        buffer = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, size + alg.traits.emits - T)))
        key = keys.row_keys(*address)
        zero = lambda: jnp.zeros(B, jnp.int32)      # a fresh array each: a donated buffer must not stand twice
        network = alg.wrap_model(model)
        cache = network.init_cache(B, size if alg.traits.caches else 0, params=params.target, inputs=inputs)
        check_fit(alg, network, cache)
        s = State(
            tokens=buffer, length=prompt_length + 0, cache=constrain(cache, heads(cache)),
            algo=None, policy=policy.init(buffer, prompt_length, prompt_length, key),
            stop=zero() if policy.stops is None else policy.stops.begin(buffer[:, :T], prompt_length, policy),
            record=None if top_logprobs is None else empty_record((B, size + alg.traits.emits), top_logprobs),
            status=jnp.where(max_new > 0, jnp.int32(Status.RUNNING), jnp.int32(Status.LENGTH)),
            stats=Stats(zero(), zero(), zero(), jnp.zeros((B, alg.traits.emits + 1), jnp.int32), zero()),
            prompt_length=prompt_length, min_new=min_new, max_length=prompt_length + max_new, key=key)
        return s.replace(algo=alg.init(params, s))

    return auto_region(build, params, policy, tokens, *bounds)
