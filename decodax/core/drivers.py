"""Compiled functions that start, prefill and advance a decoding state. Everything above them is host code.

Each combination of algorithm, kind of policy, batch size and buffer size compiles two programs, `begin` and `advance`.
Prefill compiles once for each combination of model, batch size, buffer size and observer, so most algorithms share it.
Prompts, temperatures, seeds, stop strings and budgets are data. States are donated from call to call, so a caller may
use only the newest one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.core import algorithm, capabilities, keys
from decodax.core.algorithm import Algorithm, Concludes, Observer
from decodax.core.cache import Cache
from decodax.core.capabilities import ReadPrompt, finish_prefill, prefill_cache
from decodax.core.host_memory import choose_rows, put_rows
from decodax.core.mesh import auto_region
from decodax.core.prefill import Extend, Prefill, Silent, prefill_rounds
from decodax.core.round import run
from decodax.core.start import init_state
from decodax.core.state import State, Stats, Status
from decodax.core.target import for_target
from decodax.core.types import Model, Params

begin = jax.jit(init_state, static_argnums=(0, 1), static_argnames=("size", "top_logprobs"), keep_unused=True)
"""`init_state`, compiled. It keeps weights as arguments even if it does not use them: the state is then committed to
the devices of the weights, as after `advance`. Otherwise `advance` would be compiled for both placements."""


def compiled() -> int:
    """Returns the number of programs that the functions of this module have compiled in this process."""
    programs: Any = (begin, commit_prompts, _take_rows, _take_rows_shared, _load_prefix, _extend, _fan_out,
                     _fan_out_shared, _refill, stack_rows, advance, _outcome, _fork, _rewind, _kept, _recall)
    return sum(program._cache_size() for program in programs)


def prefill(alg: Algorithm, model: Model, params: Params, s: State, *, width: int) -> State:
    """Writes all prompt tokens except the newest one into the cache, in chunks of `width` tokens (at most the buffer's
    size).

    The compiled program does not depend on the policy, and on the algorithm only if that has an observer
    (`LearnsFromPrompt`), so algorithms share it.
    """
    if not alg.traits.prefills:
        return s
    alg = for_target(alg, model)
    observer = algorithm.prefill_observer(alg)
    seen = s.replace(cache=None, algo=None, policy=None, record=None, stats=None)
    if observer is None:        # neither its weights nor the room that its rounds want behind the text
        seen, params = seen.replace(tokens=s.tokens[:, :s.cache.capacity]), params.replace(draft=None)
    held = s.cache, None if observer is None else s.algo
    rows = _together(s, held)
    (cache, algo), status = commit_prompts(observer, model, params, held, seen, width=width, rows=rows)
    return s.replace(cache=cache, algo=s.algo if observer is None else algo, status=status)


def _together(s: State, held: tuple[Cache, Any]) -> int:
    """Returns the number of rows that are prefilled together: the whole batch, but on a single CPU device a batch of 8,
    16, ... rows is split into groups of 4 rows or an eighth, whichever is more. Rows with common arrays in what `held`
    has (the cache, and the state of an algorithm that reads the prompts) stay together.

    There a chunk costs almost in proportion to its rows, finished or not (125M shape, 32 tokens: 0.10 s with one row,
    0.27 s with 4, 0.52 s with 8). Groups save the cost of padding rows, and of short prompts that would wait for the
    longest. On other devices, many rows share one read of the weights.
    """
    devices: list[Any] = list(s.tokens.sharding.device_set)
    alone = len(devices) == 1 and devices[0].platform == "cpu" and s.batch % 8 == 0
    caches = [x for x in jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, Cache)) if isinstance(x, Cache)]
    apart = all(cache.layout.by_row for cache in caches) and all(
        x.shape[:1] == (s.batch,) for x in jax.tree.leaves(held[1]))
    return max(s.batch // 8, 4) if alone and apart else s.batch


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("width", "rows"), donate_argnums=(3,))
def commit_prompts(observer: Observer | None, model: Model, params: Params, held: tuple[Cache, Any], s: State, *,
                   width: int, rows: int) -> tuple[tuple[Cache, Any], Array]:
    """The compiled program of `prefill`.

    Args:
        observer: the algorithm's observer, or None.
        model: the network.
        params: the weights.
        held: the cache, and the algorithm's state if there is an observer; donated.
        s: the state without these, without policy, record and statistics.
        width: number of tokens in a chunk.
        rows: number of rows that are prefilled together, one group after the other; a divisor of the batch size, and
            equal to it if rows have common arrays in `held`.

    Returns:
        `held` after the prompts, and the status of each row.
    """
    # room behind the text, so that no row counts as full or done: that is for the rounds that emit tokens
    room = ((0, 0), (0, 2 if observer is None else 0))
    s = s.replace(tokens=jnp.pad(s.tokens, room), max_length=jnp.full_like(s.max_length, jnp.iinfo(jnp.int32).max))

    def commit(s: State, held: tuple[Cache, Any]) -> tuple[tuple[Cache, Any], Array]:
        chunks, none = Prefill(observer, width), jnp.zeros(s.batch, jnp.int32)
        s = s.replace(cache=prefill_cache(held[0]), algo=held[1],
                      stats=Stats(none, none, none, jnp.zeros((s.batch, 2), jnp.int32), none))
        done = run(chunks, model, params, Silent(jnp.zeros((s.batch, 0), jnp.int32)),
                   s.replace(algo=chunks.init(params, s)), prefill_rounds(s, width))
        settle = lambda cache, weights, tokens: finish_prefill(cache, ReadPrompt(model, weights, tokens))
        return (auto_region(settle, done.cache, params.target, s.tokens), done.algo[0]), done.status

    def group(i: Array, done: tuple[Any, Array]) -> tuple[Any, Array]:
        some = lambda x: lax.dynamic_slice_in_dim(x, i * rows, rows)
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, i * rows, 0), done,
                            commit(jax.tree.map(some, s), jax.tree.map(some, done[0])))

    if rows == s.batch:
        return commit(s, held)
    # groups behind the last running row have nothing to do
    last = jnp.where(s.running, jnp.arange(s.batch, dtype=jnp.int32) // rows + 1, 0).max()
    return lax.fori_loop(0, last, group, (held, s.status))


@jax.jit
def stack_rows(caches: tuple[Cache, ...]) -> Cache:
    """Concatenates caches of one row each into one cache, whose row `i` is that of `caches[i]`."""
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)


def take_rows(cache: Cache, rows: Array) -> Cache:
    """Returns `cache.select(rows)`, compiled. The cache is donated if its rows share memory."""
    return _donating(cache, _take_rows, _take_rows_shared, cache, rows)


def _taken(cache: Cache, rows: Array) -> Cache:
    return cache.select(rows)


_take_rows, _take_rows_shared = jax.jit(_taken), jax.jit(_taken, donate_argnums=0)


def load_prefix(alg: Algorithm, model: Model, params: Params, cache: Cache, tokens: Array, kv: Sequence[Any],
              length: Any, reuse: tuple[Any, Any] | None = None) -> Cache:
    """Fills the empty cache of a state with keys and values computed earlier, and finishes it for decoding.

    Args:
        alg: the decoding method, which may wrap the model.
        model: the network.
        params: the weights.
        cache: the empty cache.
        tokens: `i32[B, N]`, the text of each row.
        kv: keys and values of each layer side by side, `f[B, G, T, d + e]`.
        length: `i32[B]`, number of tokens of each row whose keys and values are given.
        reuse: see `LoadsPrefix.load_prefix`.
    """
    return _load_prefix(alg.wrap_model(model), params.target, cache, tokens, tuple(kv), length, reuse)


@functools.partial(jax.jit, static_argnums=(0,))
def _load_prefix(model: Model, weights: Any, cache: Cache, tokens: Array, kv: tuple[Array, ...], length: Array,
               reuse: tuple[Array, Array] | None) -> Cache:
    def settled(cache: Cache, weights: Any, tokens: Array, kv: tuple[Array, ...], length: Array,
                reuse: tuple[Array, Array] | None) -> Cache:
        whole = capabilities.load_prefix(prefill_cache(cache), kv, length, reuse)
        return finish_prefill(whole, ReadPrompt(model, weights, tokens))

    return auto_region(settled, cache, weights, tokens, kv, length, reuse)


def extend(alg: Algorithm, model: Model, params: Params, s: State, *, width: int) -> State:
    """Writes the prompt tokens that the cache does not have yet, except the newest one, after the tokens from
    `load_prefix`, in chunks of `width`."""
    seen = s.replace(cache=None, algo=None, policy=None, record=None, stats=None)
    cache, status = _extend(alg.wrap_model(model), params.replace(draft=None), s.cache, seen, width=width)
    return s.replace(cache=cache, status=status)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("width",), donate_argnums=(2,))
def _extend(model: Model, params: Params, cache: Cache, s: State, *, width: int) -> tuple[Cache, Array]:
    none = jnp.zeros(s.batch, jnp.int32)
    s = s.replace(cache=cache, max_length=jnp.full_like(s.max_length, jnp.iinfo(jnp.int32).max),
                  tokens=jnp.pad(s.tokens, ((0, 0), (0, 2))),
                  stats=Stats(none, none, none, jnp.zeros((s.batch, 2), jnp.int32), none))

    def loop(unfinished: Any, body: Any, carry: Any) -> Any:
        return lax.while_loop(lambda c: unfinished(c) & Extend.left(c[1]).any(), body, carry)

    done = run(Extend(width), model, params, Silent(jnp.zeros((s.batch, 0), jnp.int32)), s,
               jnp.iinfo(jnp.int32).max, loop)
    return done.cache, done.status


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def advance(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array,
            fewest: Array | None = None) -> State:
    """Runs rounds until at most `fewest` rows are running (default 0), or `max_rounds` rounds are done. Pass both as
    `i32[]` arrays."""
    return run(alg, model, params, policy, s, max_rounds, fewest=0 if fewest is None else fewest)


def outcome(alg: Algorithm, s: State) -> State:
    """Returns the state whose rows are the results (`Concludes.outcome`), without the cache; compiled."""
    s = s.replace(cache=None)
    if not isinstance(alg, Concludes) or type(alg).outcome is Concludes.outcome:
        return s
    return _outcome(alg, s)


@functools.partial(jax.jit, static_argnums=0)
def _outcome(alg: Algorithm, s: State) -> State:
    return auto_region(functools.partial(algorithm.outcome, alg), s, like=s)


def refill(s: State, policy: Any, new: State, new_policy: Any, rows: Array) -> tuple[State, Any]:
    """Replaces rows of a state and a policy by new rows, so that a finished row's place serves the next request.

    Args:
        s: the state; donated.
        policy: the policy; its arrays are donated.
        new: a state with `B'` new rows.
        new_policy: the policy of the new rows.
        rows: `i32[B']`, the place of each new row, all different. A place beyond the batch drops the new row.

    Raises:
        ValueError: rows of the cache share memory, so single rows cannot be replaced.
    """
    if s.cache is not None and not s.cache.layout.by_row:
        raise ValueError(f"cache: rows of {type(s.cache).__name__} share memory, so none can be replaced alone")
    s, mine = _refill((s, policy.own), (new, new_policy.own), rows)
    return s, mine.sharing(policy)


@functools.partial(jax.jit, donate_argnums=0)
def _refill(held: Any, new: Any, rows: Array) -> Any:
    put = lambda held, new, rows: jax.tree.map(lambda x, y: put_rows(x, y, rows), held, new)
    return auto_region(put, held, new, rows, like=held)


def fork(s: State, rows: Array, keys: Array, generation: Array) -> State:
    """Returns the state whose row `i` continues row `rows[i]`, including the algorithm's state. `s` is donated.

    A row that continues another one draws with a new random key: `keys[i]` folded with `generation[i]`. A row that
    continues itself keeps its key.

    Args:
        s: the state.
        rows: `i32[B]`, the row that each row continues.
        keys: `key[B]`, base of the new key of each row.
        generation: `u32[B]`, number that is folded into it, so that a row gets another key each time.
    """
    return _fork(s, rows, keys, generation)


@functools.partial(jax.jit, donate_argnums=0)
def _fork(s: State, rows: Array, key: Array, generation: Array) -> State:
    def moved(s: State, rows: Array, key: Array, generation: Array) -> State:
        new = jnp.where(rows == jnp.arange(s.batch), s.key, _later(key, generation))
        algo = jax.tree.map(lambda x: x[rows], s.algo)
        return s.succeed(rows).replace(algo=algo, key=new)

    return auto_region(moved, s, rows, key, generation, like=s)


def _later(key: Array, generation: Array) -> Array:
    return jax.vmap(jax.random.fold_in)(key, generation)


def kept(s: State, rows: Array) -> State:
    """Returns a copy of the rows `rows` (`i32[B']`) of a state, for searches that return to them later."""
    return _kept(s, rows)


@jax.jit
def _kept(s: State, rows: Array) -> State:
    return auto_region(lambda s, rows: s.select(rows), s, rows)


def put(held: State, new: State, rows: Array) -> State:
    """Replaces rows of a stored state `held`, which is donated, by the rows of `new`.

    Args:
        held: the stored state, from `kept`.
        new: a state with `B'` rows.
        rows: `i32[B']`, the place of each new row, all different. A place beyond the end drops the new row.

    Raises:
        ValueError: rows of the cache share memory, so single rows cannot be replaced.
    """
    if not held.cache.layout.by_row:
        raise ValueError(f"cache: rows of {type(held.cache).__name__} share memory, so none can be kept alone")
    return _refill(held, new, rows)


def recall(s: State, held: State, rows: Array, keys: Array, generation: Array) -> State:
    """Returns the state whose row `i` continues the stored row `rows[i]` of `held`; if `rows[i]` is negative, row `i`
    does not change. `s` is donated.

    A row that continues a stored one draws with the key `keys[i]` of its place, folded with `generation[i]` (`u32[B]`).
    """
    return _recall(s, held, rows, keys, generation)


@functools.partial(jax.jit, donate_argnums=0)
def _recall(s: State, held: State, rows: Array, key: Array, generation: Array) -> State:
    def taken(s: State, held: State, rows: Array, key: Array, generation: Array) -> State:
        new = held.select(jnp.maximum(rows, 0)).replace(key=_later(key, generation))
        return jax.tree.map(lambda x, y: choose_rows(rows >= 0, y, x), s, new)

    return auto_region(taken, s, held, rows, key, generation, like=s)


def rewind(s: State, length: Array, back: Array, keys: Array, generation: Array) -> State:
    """Truncates some rows. They draw with new random keys from there on. `s` is donated.

    The cache has to support truncation, and neither the policy nor the method may have state that depends on the text.
    The caller has to reset the state of the stop automaton.

    Args:
        s: the state.
        length: `i32[B]`, number of first tokens that are kept.
        back: `bool[B]`, the rows that are truncated.
        keys: `key[B]`, base of the new key of each row.
        generation: `u32[B]`, number that is folded into it, so that a row gets another key each time.
    """
    return _rewind(s, length, back, keys, generation)


@functools.partial(jax.jit, donate_argnums=0)
def _rewind(s: State, length: Array, back: Array, key: Array, generation: Array) -> State:
    def shorter(s: State, length: Array, back: Array, key: Array, generation: Array) -> State:
        length = jnp.where(back, length, s.length)
        held = jnp.arange(s.tokens.shape[1]) < length[:, None]
        record = jax.tree.map(lambda x: jnp.where(held.reshape(*held.shape, *[1] * (x.ndim - 2)), x, 0), s.record)
        return s.replace(length=length, cache=capabilities.truncate(s.cache, length - 1), record=record,
                         key=jnp.where(back, _later(key, generation), s.key))

    return auto_region(shorter, s, length, back, key, generation, like=s)


def fan_out(s: State, policy: Any, rows: Array, live: Array, *address: Array) -> State:
    """Returns the state whose row `i` is a sample of the prefilled row `rows[i]`. `s` is donated if rows of its cache
    share memory, so that shared entries are not copied.

    Args:
        s: the prefilled state.
        policy: policy of the new rows.
        rows: `i32[B']`, the prefilled row of each sample.
        live: `bool[B']`; False for padding rows, which are finished from the start.
        address: seed, request and sample number of each new row, the arguments of `keys.row_keys`.
    """
    return _donating(s.cache, _fan_out, _fan_out_shared, s, policy, rows, live, *address)


def _donating(cache: Cache | None, plain: Any, shared: Any, *args: Any) -> Any:
    """Calls `shared`, which donates its first argument, if rows of `cache` share memory; otherwise calls `plain`."""
    if cache is None or cache.layout.by_row:
        return plain(*args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")       # those of the rows
        return shared(*args)


def _fanned(s: State, policy: Any, rows: Array, live: Array, *address: Array) -> State:
    def samples(s: State, policy: Any, rows: Array, live: Array, *address: Array) -> State:
        key = keys.row_keys(*address)
        s = s.select(rows)
        status = jnp.where(live, s.status, jnp.int32(Status.LENGTH))
        return s.replace(key=key, status=status, policy=policy.init(s.tokens, s.length, s.prompt_length, key))

    return auto_region(samples, s, policy, rows, live, *address)


_fan_out, _fan_out_shared = jax.jit(_fanned), jax.jit(_fanned, donate_argnums=0)
