"""The round: propose a window, score it with one model call, decide what is true, commit it.

`step` is one round and `run` a loop of them. Whole generation, streaming, replicas under `shard_map` and a batch
scheduler are drivers of the same compiled step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.core.capabilities import ReadPrompt, Refreshes
from decodax.core.checks import array, instance, pair, same_form
from decodax.core.clip import clip
from decodax.core.mesh import auto_region
from decodax.core.record import record
from decodax.core.state import State, Stats, Status
from decodax.core.types import Algorithm, Decision, Model, Out, Params
from decodax.core.window import Window, take


def step(alg: Algorithm, model: Model, params: Params, policy: Any, s: State) -> State:
    """One round. Nothing unverified reaches the cache: what `decide` does not accept is never written.

    An algorithm with `variants` has rounds of several shapes; `alg.choose` picks one of them for the whole batch.
    """
    if variants := alg.variants:
        index = alg.choose(params, policy, s)
        for i, variant in enumerate(variants):
            s = _if(index == i, functools.partial(step, variant, model, params, policy), s)
        return s
    s = _renew(model, params, s)
    window, algo = pair(f"{alg.name}.propose", alg.propose(params, policy, s), "a Window and the method's state")
    instance(f"{alg.name}.propose", window, Window, "a Window first")
    network = alg.through(model)
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
    keep = works[:, None] & ("rewrites" in alg.cache_needs or d.slots < end[:, None])
    entries, slots = out.entries, jnp.where(keep, d.slots, -1)
    if (most := alg.commits) is not None and most < slots.shape[1]:
        entries, slots = _kept(entries, slots, most)
    return s.replace(
        tokens=_append(s.tokens, d.tokens, s.length, count), length=length, cache=s.cache.commit(entries, slots),
        algo=d.algo, policy=_where(count > 0, moved, s.policy), stop=stop, status=status,
        record=_record(s, d, dist, count), stats=_count(s, d))


def _check(alg: Algorithm, d: Decision, s: State, window: Window) -> None:
    """Raises TypeError for a decision that is none, by the name of the method."""
    who, sizes = f"{alg.name}.decide", {"B": s.batch, "W": window.width}
    instance(who, d, Decision, "a Decision")
    for name, form in (("tokens", "i[B, M]"), ("count", "i[B]"), ("slots", "i[B, W]"), ("source", "i[B, M]")):
        array(who, name, getattr(d, name), form, sizes)


def _kept(entries: Any, slots: Array, most: int) -> tuple[Any, Array]:
    """The entries that are kept, `most` of a row at most, and their slots, of a window that has more nodes.

    A TPU scatters those of 6 nodes where they lie. For those of a tree of 33 it moves layers of the cache to fast
    memory and back.
    """
    keep = slots >= 0
    rank = jnp.cumsum(keep, 1) - 1
    hit = keep[:, None] & (rank[:, None] == jnp.arange(most, dtype=rank.dtype)[:, None])
    which = jnp.argmax(hit, -1).astype(jnp.int32)
    return (jax.tree.map(lambda x: x if x.shape[1] == 1 else take(x, which), entries),
            jnp.where(hit.any(-1), take(slots, which), -1))


def _renew(model: Model, params: Params, s: State) -> State:
    """Refreshes the rows whose entries the cache wants computed anew (`Refreshes`): one more forward."""
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
    """`then(s)` or `s`. As a loop of one trip or none, since XLA copies the caches that a conditional writes to."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros((), bool), then(c[1])), (condition, s))[1]


def run(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
        loop: Callable[..., Any] | None = None, fewest: Array | int = 0) -> State:
    """Rounds until every row has finished, `max_rounds` of them at most.

    Args:
        max_rounds: traced; streaming calls again with what came out.
        loop: `lax.while_loop`, the default, or `python_loop` to look at each round (the two agree bit for bit).
        fewest: traced; stops when no more rows than this are running, so that others can take the places of those that
            have finished.
    """
    def unfinished(carry: tuple[Array, State, Array]) -> Array:
        return (carry[0] < carry[2][0]) & (carry[1].running.sum() > carry[2][1])

    def region(params: Params, policy: Any, s: State, bounds: Array) -> State:
        def body(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
            before, after = carry[1], step(alg, model, params, policy, carry[1])
            for who, name in ((alg.name, "algo"), (type(before.cache).__name__, "cache"), ("transforms", "policy")):
                same_form(who, f"its state (s.{name})", getattr(after, name), getattr(before, name))
            return carry[0] + 1, after, carry[2]

        return (loop or lax.while_loop)(unfinished, body, (jnp.zeros((), jnp.int32), s, bounds))[1]

    bounds = jnp.stack([jnp.asarray(max_rounds, jnp.int32), jnp.asarray(fewest, jnp.int32)])
    return auto_region(region, params, policy, s, bounds, like=s)


def python_loop(unfinished: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """`lax.while_loop` as a Python loop, for debugging and for the laws."""
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
