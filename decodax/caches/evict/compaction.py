"""Moves the kept tokens to the front of a layer's arrays, and makes the view of a layer for eviction rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.cache.packed_heads import pack, unpack
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Selection
from decodax.caches.rotation import moved


def held_of(score: TokenScore, layer: int, depth: int, shape: KVLayer, outputs: Array | None,
            row: tuple[Any, ...]) -> HeldLayer:
    """Returns the cached entries of one layer of one row as a `HeldLayer`, in the form that an eviction rule takes.

    Args:
        score: score of the rule.
        layer, depth, shape, outputs: fields of `HeldLayer`.
        row: a pair and three more values: the layer's arrays (keys and values, positions, starts, counts, latest
            queries, statistics), the length, `prompt_length`, `since`, and one value that is ignored.
    """
    (kv, positions, starts, count, ring, gathered), length, began, since, _ = row
    if starts is not None:
        spread = functools.partial(unpack, starts=starts, count=count, slots=positions.size)
        kv, positions = spread(kv), spread(positions, empty=-1)
        gathered = gathered.replace(slots=jax.tree.map(spread, gathered.slots))
    w = ring.shape[1]
    order = (length + jnp.arange(w, dtype=jnp.int32)) % max(w, 1)       # the oldest first
    f32 = lambda x: x.astype(jnp.float32)
    held = HeldLayer(keys=f32(kv[..., :shape.width]), values=f32(kv[..., shape.width:]), positions=positions,
                     count=count, length=length, prompt_length=began, since=since,
                     queries=f32(ring[:, order].swapaxes(0, 1)),
                     gathered=gathered, outputs=outputs, layer=layer, depth=depth, shape=shape)
    return held.replace(gathered=gathered.replace(slots=score.renew(held)))


def compacted(selection: Selection, view: Callable[[Any], HeldLayer], shape: tuple[int, ...], room: int | None,
              size: int, close_up: bool, row: tuple[Any, ...]) -> tuple[Array, Array, Array | None, Array, Any]:
    """Evicts tokens from one layer of one row, and returns its arrays with the kept tokens moved together: keys and
    values, positions, starts, counts, and the statistics of the slots.

    Args:
        selection: chooses the kept tokens, if `row` has no mask of them.
        view: makes a `HeldLayer` from the first part of `row`.
        shape: slots of the result: `[G, S]`; if heads are packed into segments of one array, `[N, SEGMENT]`.
        room: number of slots for later tokens of a packed head. None: heads are not packed.
        size: maximum number of tokens of a text.
        close_up: whether keys are moved to positions without gaps.
        row: three values: the `row` of `held_of`, with the number of tokens to keep in the last place; True if this row
            evicts now; and the mask of the kept tokens, or None.
    """
    own, choose, chosen = row
    held, (kv, positions, before, count, _, gathered) = view(own), own[0]
    stays = selection.choose(held, own[-1]) if chosen is None else chosen
    stays = jnp.where(choose, stays, held.valid)
    first = jnp.argsort(~stays, axis=-1, stable=True)
    number = stays.sum(-1, dtype=jnp.int32)
    spread = lambda x: x if before is None else unpack(x, before, count, held.slots)
    # a row that does not evict now has its latest queries counted when it does
    slots_of = jax.tree.map(lambda new, old: jnp.where(choose, new, spread(old)), held.gathered.slots, gathered.slots)
    starts: Array | None = None
    if room is not None:
        starts, head, source = pack(first, number, room, size, shape[0])
        filled, rank = (source >= 0).reshape(shape), jnp.arange(shape[0] * shape[1]) - starts[head] * shape[1]
        move = lambda x: x[head, jnp.maximum(source, 0)].reshape(*shape, *x.shape[2:])
        number_of, rank = number[head].reshape(shape), rank.reshape(shape)
    else:
        first = first[:, :shape[1]] if shape[1] <= first.shape[1] else jnp.pad(
            first, ((0, 0), (0, shape[1] - first.shape[1])))
        rank = jnp.arange(shape[1], dtype=jnp.int32)
        filled, number_of = rank < number[:, None], number[:, None]
        move = lambda x: jnp.take_along_axis(x, first.reshape(*first.shape, *[1] * (x.ndim - 2)), 1)
    kv, at = move(spread(kv)), jnp.where(filled, move(spread(positions)), -1)
    if close_up:
        # the tokens that stay become the latest ones: keys are rotated by the distance to their new positions
        by = jnp.where(filled, held.length - number_of + rank - at, 0)
        keys = jax.vmap(functools.partial(moved, held.shape))(kv[:, :, None, :held.shape.width], by)[:, :, 0]
        kv = jnp.concatenate([keys, kv[..., held.shape.width:]], -1)
    slots_of = jax.tree.map(lambda x: jnp.where(filled, move(x), 0), slots_of)
    if before is None:
        return kv, at, starts, number, slots_of
    # a row that does not evict keeps its packing, since it has already used some of the room of its heads
    keep = lambda new, old: jnp.where(choose, new, old)
    return (keep(kv, own[0][0]), keep(at, positions), keep(starts, before), number,
            jax.tree.map(keep, slots_of, gathered.slots))
