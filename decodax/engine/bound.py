"""A decoding method put on a model, as pure functions: for training loops and for a `jit` of your own."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.arguments import shown, whole
from decodax.common.registry import Configured
from decodax.common.struct import Struct, short, struct
from decodax.core import drivers
from decodax.core.algorithm import Algorithm, check_policy, name_of
from decodax.core.fitting import fit_cache
from decodax.core.memory import afford, bucket
from decodax.core.round import run, step
from decodax.core.state import State
from decodax.core.types import CacheKind, Model, Params
from decodax.engine.methods import method_on, model
from decodax.io.load import LM
from decodax.sampling import Policy
from decodax.sampling.build import build


@struct
class Running(Struct):
    """Rows in the middle of decoding: what `BoundMethod.init` returns, and what each step maps to its successor.

    Attributes:
        state: what evolves; see `decodax.State`.
        policy: sampling options of each row, which stay as they are.
    """

    state: State
    policy: Policy

    @property
    def tokens(self) -> Array:
        """Prompts and the tokens after them, `i32[B, N]`; entries at `lengths` and beyond are undefined."""
        return self.state.tokens

    @property
    def lengths(self) -> Array:
        """Number of tokens of each row, the prompt's included: `i32[B]`."""
        return self.state.length

    @property
    def running(self) -> Array:
        """True for rows that have not finished: `bool[B]`."""
        return self.state.running


@struct
class Info(Struct):
    """Diagnostics of one round.

    Attributes:
        count: `i32[B]`, number of tokens that the round appended to each row.
        drafted, accepted: `i32[B]`, draft tokens that were offered to the model, and that it accepted.
        status: `i32[B]`, a `decodax.Status` for each row after the round.
    """

    count: Array
    drafted: Array
    accepted: Array
    status: Array


@dataclasses.dataclass(frozen=True)
class BoundMethod:
    """A decoding method on a model, with sizes: `init`, `step` and `run` are pure functions of weights and rows.

    Make it by `decodax.bind`, once: `jax.jit(bound.step)` of another one compiles again.

    Attributes:
        algorithm: the method without its weights.
        model: the network, with its cache.
        capacity: number of tokens of a row, prompt and new tokens, that buffers are made for.
        new: largest number of new tokens that method and cache are made for.
        chunk: number of prompt tokens of a prefill forward.
        eos: ids that end a row by default.
        vocab_size: number of ids of the model.
        weights: what the method brings (`Algorithm.weights`), for `params`.
    """

    __repr__ = short

    algorithm: Algorithm
    model: Model
    capacity: int
    new: int
    chunk: int
    eos: tuple[int, ...]
    vocab_size: int
    weights: Any = dataclasses.field(default=None, compare=False, repr=False)

    def params(self, target: Any) -> Params:
        """Returns all weights of a step: those of the model, `target`, and those that the method brings."""
        return Params(target, self.weights)

    def init(self, params: Params, tokens: Any, lengths: Any, seed: Any = 0, *, max_new_tokens: Any = 64,
             policy: Policy | None = None, inputs: Any = None, request_ids: Any = None, **sampling: Any) -> Running:
        """Returns rows that have been prefilled, before their first round.

        Args:
            params: weights, from `params`.
            tokens: `i32[B, T]`, prompts of B rows, left-aligned.
            lengths: `i32[B]`, number of tokens of each prompt, from 1 to T.
            seed: `u32[]` or `u32[B]`. With the ids it addresses every draw, as in `decodax.generate`.
            max_new_tokens: largest number of new tokens, `i32[]` or `i32[B]`; not more than `new`.
            policy: sampling policy of the B rows (times those of a prompt, for a method that works on several rows of
                one), from `decodax.sampling.build`. Default: built from `sampling`.
            inputs: what the model takes beside tokens, a pytree of arrays `[B, ...]`.
            request_ids: `u32[B]`; default the row's number.
            sampling: options as of `decodax.sampling.build`: temperature, top_p, ... Without any it is greedy.

        Raises:
            ValueError: prompts longer than the capacity, options beside a policy, or weights that do not belong to it.
        """
        params = self._given(params)
        batch = len(tokens)
        if tokens.shape[1] > self.capacity:
            raise ValueError(f"tokens: got prompts of up to {tokens.shape[1]} tokens for a capacity of {self.capacity}")
        each = self.algorithm.traits.samples or 1
        if policy is None:
            given = {"eos_token_id": list(self.eos), "vocab_size": self.vocab_size, **sampling}
            policy = build(batch * each, **given)
        elif sampling:
            raise ValueError(f"{min(sampling)}: got one beside a policy, which says how rows are sampled")
        check_policy(self.algorithm, policy)
        policy = jax.tree.map(jnp.asarray, policy)
        firsts = policy if each == 1 else policy.select(jnp.arange(batch) * each)
        seed = jnp.broadcast_to(jnp.asarray(seed, jnp.uint32), (batch,))
        ids = jnp.arange(batch, dtype=jnp.uint32) if request_ids is None else jnp.asarray(request_ids, jnp.uint32)
        s = drivers.begin(self.algorithm, self.model, params, firsts, jnp.asarray(tokens, jnp.int32),
                          jnp.asarray(lengths, jnp.int32), size=self.capacity, seed=seed, request=ids, inputs=inputs,
                          max_new=jnp.broadcast_to(jnp.minimum(max_new_tokens, self.new).astype(jnp.int32), (batch,)))
        s = drivers.prefill(self.algorithm, self.model, params, s, width=min(self.chunk, self.capacity))
        if each > 1:
            prompt, sample = jnp.divmod(jnp.arange(batch * each, dtype=jnp.int32), each)
            s = drivers.fan_out(s, policy, prompt, jnp.ones(batch * each, bool), seed[prompt], ids[prompt],
                                sample.astype(jnp.uint32))
        if getattr(s.length, "committed", False) and len(s.length.sharding.device_set) == 1:
            # so is then all that a step returns: its second call would compile again for a policy that is not
            policy = jax.tree.map(lambda x: jax.device_put(x, s.length.sharding), policy)
        return Running(s, policy)

    def step(self, params: Params, rows: Running) -> tuple[Running, Info]:
        """Runs one round, and returns the rows after it and its diagnostics. Finished rows are not changed."""
        before = rows.state
        s = step(self.algorithm, self.model, self._given(params), rows.policy, before)
        info = Info(count=s.length - before.length, drafted=s.stats.drafted - before.stats.drafted,
                    accepted=s.stats.accepted - before.stats.accepted, status=s.status)
        return rows.replace(state=s), info

    def run(self, params: Params, rows: Running, rounds: Array | int | None = None) -> Running:
        """Runs rounds until all rows have finished, at most `rounds` of them (`i32[]`; None: no limit)."""
        most = jnp.iinfo(jnp.int32).max if rounds is None else rounds
        return rows.replace(state=run(self.algorithm, self.model, self._given(params), rows.policy, rows.state, most))

    def outcome(self, rows: Running) -> State:
        """Returns the state whose rows are the results. It differs from `rows.state` for methods that keep finished
        texts beside their rows, such as beam search; the cache is left out."""
        return drivers.outcome(self.algorithm, rows.state)

    def _given(self, params: Any) -> Params:
        if isinstance(params, Params):
            return params
        if jax.tree.leaves(self.weights):
            raise ValueError(f"params: {name_of(self.algorithm)} brings weights or numbers of its own; takes "
                             "bound.params(weights)")
        return self.params(params)


def bind(lm: LM | str | os.PathLike[str], algorithm: Algorithm | Configured | str | None = None, *,
         cache: CacheKind | Configured | str | None = None, capacity: int = 2048, max_new_tokens: int | None = None,
         draft: LM | str | os.PathLike[str] | None = None, chunk: int = 64) -> BoundMethod:
    """Puts a decoding method and a cache on a model, and returns pure functions: `init`, `step` and `run`.

    >>> import decodax as dx
    >>> bound = dx.bind("pycode", "prompt-lookup:length=4", capacity=256)                     # doctest: +SKIP
    >>> rows = bound.init(lm.params, tokens, lengths, seed=0, temperature=0.8)                # doctest: +SKIP
    >>> rows, info = jax.jit(bound.step)(lm.params, rows)                                     # doctest: +SKIP

    Args:
        lm: as in `decodax.generate`. Its weights are not kept: they are the first argument of each function.
        algorithm: decoding method, from `decodax.algorithms` or as a string; default plain decoding.
        cache: what the cache keeps, from `decodax.caches` or as a string; default everything.
        capacity: largest number of tokens of a row, prompt and new tokens; rounded up to a size of `bucket`.
        max_new_tokens: largest number of new tokens that caches with a budget make room for; default `capacity`.
        draft: draft model, for an algorithm that is given by name and needs one.
        chunk: number of prompt tokens of a prefill forward.

    Raises:
        ValueError, TypeError: as in `decodax.generate`.
    """
    lm = model(lm)
    size = bucket(whole("capacity", capacity, 1))
    new = size if max_new_tokens is None else whole("max_new_tokens", max_new_tokens, 1)
    if new > size:
        raise ValueError(f"max_new_tokens: got {shown(new)} for a capacity of {size}")
    lm, method = method_on(lm, cache, algorithm, 1, draft)
    method = method.with_length(new)
    network = fit_cache(lm.model, new)
    afford(method, network, lm.mesh, 1, size, "capacity")
    return BoundMethod(method.bare(), network, size, new, whole("chunk", chunk, 1), tuple(lm.eos),
                       lm.vocab_size, method.weights)
