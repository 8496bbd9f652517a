"""The round: propose a window, score it with one model call, decide which tokens are accepted, commit their entries.

`step` is one round and `run` a loop of rounds. Generation, streaming, replicas under `shard_map` and a batch scheduler
all use this compiled step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.core.algorithm import Algorithm, name_of, variants
from decodax.core.capabilities import ReadPrompt, Refreshes
from decodax.core.checks import arrays, instance, pair, same_form
from decodax.core.clip import clip
from decodax.core.mesh import auto_region
from decodax.core.record import record
from decodax.core.state import State, Stats, Status
from decodax.core.target import for_target
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window, take

WINDOW = {"tokens": "i[B, W]", "positions": "i[B, W]", "mask": "b[B or 1, W, W]", "live": "b[B, W]"}
DECISION = {"tokens": "i[B, M]", "count": "i[B]", "slots": "i[B, W]", "source": "i[B, M]"}
"""Dtypes and shapes of the arrays that a method returns."""


def step(alg: Algorithm, model: Model, params: Params, policy: Any, s: State) -> State:
    """Runs one round and returns the new state. Entries of tokens that `decide` does not accept are never written to
    the cache.

    An algorithm with `variants` has rounds of several shapes; `alg.choose` selects one of them for the whole batch.
    """
    alg = for_target(alg, model)
    if kinds := variants(alg):
        index = alg.choose(params, policy, s)       # type: ignore[attr-defined]
        for i, variant in enumerate(kinds):
            s = _if(index == i, functools.partial(step, variant, model, params, policy), s)
        return s
    s = _renew(model, params, s)
    window, algo = pair(f"{name_of(alg)}.propose", alg.propose(params, policy, s), "a Window and the method's state")
    who = f"{name_of(alg)}.propose"
    instance(who, window, Window, "a Window first")
    # several rows for each row of the batch, where a method scores several canvases of a row in one forward
    rows = (*np.shape(window.tokens), s.batch)[0]
    arrays(who, window, Window, "a Window first", WINDOW, {"B": rows if rows % s.batch == 0 else s.batch})
    network = alg.wrap_model(model)
    out = instance(f"{type(network).__name__}.apply", network.apply(params.target, window, s.cache), Out, "an Out")
    dist = policy.over(s, window, out)
    if window.num_scored is not None:
        dist = dist.first(window.num_scored)
    d = alg.decide(params, dist, s, window, out, algo)
    _check(alg, d, s, window)
    if d.rows is not None:
        s, out, dist = s.succeed(d.rows), out.rows(d.rows), dist.select(d.rows)
    count, status, stop = clip(d, s, policy)
    last = jnp.maximum(count - 1, 0)[:, None]
    moved = dist.advance(take(d.source, last)[:, 0], take(d.tokens, last)[:, 0])
    # entries of tokens that were cut, and all of a row that had finished before or ends with no token, stay out of the
    # cache: it may have no room for them. Of a row that ends the newest token's stays out, too: so it may go on later
    length = s.length + count
    works = s.running & ((count > 0) | (status == Status.RUNNING))
    end = length - (status != Status.RUNNING)
    keep = works[:, None] & ("rewrites" in alg.traits.needs or d.slots < end[:, None])
    entries, slots = out.entries, jnp.where(keep, d.slots, -1)
    if (most := alg.traits.commits) is not None and most < slots.shape[1]:
        entries, slots = _kept(entries, slots, most)
    return s.replace(
        tokens=_append(s.tokens, d.tokens, s.length, count), length=length, cache=s.cache.commit(entries, slots),
        algo=d.algo, policy=_where(count > 0, moved, s.policy), stop=stop, status=status,
        record=_record(s, d, dist, count), stats=_count(s, d))


def _check(alg: Algorithm, d: Decision, s: State, window: Window) -> None:
    """Raises TypeError with the method's name if `decide` returned no valid decision."""
    who, sizes = f"{name_of(alg)}.decide", {"B": s.batch, "W": window.width}
    arrays(who, d, Decision, "a Decision", DECISION, sizes)
    if sizes["M"] > alg.traits.emits:
        raise TypeError(f"{who}: got {sizes['M']} tokens a row, and its traits say that a round emits at most "
                        f"{alg.traits.emits}")


def _kept(entries: Any, slots: Array, most: int) -> tuple[Any, Array]:
    """Gathers the entries that are committed, at most `most` of each row, and their slots, from a window with more
    nodes.

    A TPU scatters the entries of 6 nodes in place. For a tree of 33 nodes it moves layers of the cache to fast memory
    and back.
    """
    keep = slots >= 0
    rank = jnp.cumsum(keep, 1) - 1
    hit = keep[:, None] & (rank[:, None] == jnp.arange(most, dtype=rank.dtype)[:, None])
    which = jnp.argmax(hit, -1).astype(jnp.int32)
    return (jax.tree.map(lambda x: x if x.shape[1] == 1 else take(x, which), entries),
            jnp.where(hit.any(-1), take(slots, which), -1))


def _renew(model: Model, params: Params, s: State) -> State:
    """Refreshes the rows whose entries the cache has to recompute (`Refreshes`), with one more forward pass."""
    cache = s.cache
    if not isinstance(cache, Refreshes) or (stale := cache.needs_refresh()) is None:
        return s
    rows = stale & s.running

    def once(s: State) -> State:
        stats = s.stats.replace(rounds=s.stats.rounds + rows, waited=s.stats.waited + (s.running & ~rows))
        return s.replace(cache=s.cache.refresh(  # type: ignore[attr-defined]
            ReadPrompt(model, params.target, s.tokens), rows), stats=stats)

    return _if(rows.any(), once, s)


def _if(condition: Array, then: Callable[[State], State], s: State) -> State:
    """Returns `then(s)` if `condition` is True, else `s`. It is a loop of at most one trip, since XLA copies the caches
    that a conditional writes to."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros((), bool), then(c[1])), (condition, s))[1]


def run(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
        loop: Callable[..., Any] | None = None, fewest: Array | int = 0) -> State:
    """Runs rounds until every row has finished, at most `max_rounds`.

    Args:
        alg: the decoding method.
        model: the network.
        params: weights of the model and of the method.
        policy: the sampling policy.
        s: the state.
        max_rounds: may be traced. To stream, call `run` again with the returned state.
        loop: `lax.while_loop`, the default, or `python_loop` to inspect each round; both give the same bits.
        fewest: may be traced; the loop also ends when at most this many rows are running, so that new rows can replace
            finished ones.
    """
    def unfinished(carry: tuple[Array, State, Array]) -> Array:
        return (carry[0] < carry[2][0]) & (carry[1].running.sum() > carry[2][1])

    def region(params: Params, policy: Any, s: State, bounds: Array) -> State:
        def body(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
            before, after = carry[1], step(alg, model, params, policy, carry[1])
            for who, name in ((name_of(alg), "algo"), (type(before.cache).__name__, "cache"), ("transforms", "policy")):
                same_form(who, f"its state (s.{name})", getattr(after, name), getattr(before, name))
            return carry[0] + 1, after, carry[2]

        return (loop or lax.while_loop)(unfinished, body, (jnp.zeros((), jnp.int32), s, bounds))[1]

    bounds = jnp.stack([jnp.asarray(max_rounds, jnp.int32), jnp.asarray(fewest, jnp.int32)])
    return auto_region(region, params, policy, s, bounds, like=s)


def python_loop(unfinished: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """A Python loop with the arguments and results of `lax.while_loop`, for debugging and for tests."""
    body = jax.jit(body)
    while bool(unfinished(carry)):
        carry = body(carry)
    return carry


def _append(buffer: Array, new: Array, start: Array, count: Array) -> Array:
    """Writes the first `count[b]` of `new [B, M, ...]` into `buffer [B, N + M, ...]` at `start[b]`."""
    def row(buffer: Array, new: Array, start: Array, count: Array) -> Array:
        old = lax.dynamic_slice_in_dim(buffer, start, new.shape[0])
        keep = (jnp.arange(new.shape[0]) < count).reshape(-1, *[1] * (new.ndim - 1))
        return lax.dynamic_update_slice_in_dim(buffer, jnp.where(keep, new, old), start, 0)

    return jax.vmap(row)(buffer, new.astype(buffer.dtype), start, count)


def _where(rows: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _record(s: State, d: Decision, dist: Any, count: Array) -> Any:
    if s.record is None:
        return None
    new = d.record
    if new is None:
        new = record(take(dist.logits(), d.source), take(dist.log_probs(), d.source), d.tokens, s.record.count)
    return jax.tree.map(lambda buffer, x: _append(buffer, x, s.length, count), s.record, new)


def _count(s: State, d: Decision) -> Stats:
    live = (s.running if d.idle is None else s.running & ~d.idle).astype(jnp.int32)
    waits = s.running.astype(jnp.int32) - live
    none = jnp.zeros_like(live)
    drafted, accepted = (none if x is None else x for x in (d.drafted, d.accepted))
    decided = jax.nn.one_hot(d.count, s.stats.histogram.shape[1], dtype=jnp.int32)
    return Stats(rounds=s.stats.rounds + live, drafted=s.stats.drafted + live * drafted,
                 accepted=s.stats.accepted + live * accepted, histogram=s.stats.histogram + live[:, None] * decided,
                 waited=s.stats.waited + waits)
