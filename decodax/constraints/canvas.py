"""Constraints on a canvas, whose positions are filled in any order.

Tokens that are allowed separately may contradict each other: if a word allows two letters at each of two places, not
every pair makes a word. So the tokens that a round offers for the open positions are those of *one* text that the
automaton accepts, sampled from the product of the positions' distributions. A sampler that keeps some of them and drops
the others leaves a canvas that can always be completed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, static, struct
from decodax.constraints.transform import Constrained, TokenTable
from decodax.core.types import DEAD_END
from decodax.sampling.base import Context, PyTree
from decodax.sampling.draw import draw, winner

OUTSIDE = 1e4
"""Amount by which the logits of truncated tokens are lowered. Such tokens are taken only where the language requires
one of them."""


@struct
class OnCanvas(Constrained):
    """Constrains the text on a canvas to a language. The diffusion sampler uses it through `accepted`; as a transform
    of logits it changes nothing.

    Attributes:
        whole: static; True if given text follows the open positions, as in infilling. The constrained text then extends
            from the prompt to the end of the canvas, without an end-of-sequence token.
    """

    whole: bool = static(default=False)

    def init(self, ctx: Context) -> PyTree:
        return None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return logits

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        return state


@struct
class Region(Struct):
    """A block of a canvas, for which `accepted` draws tokens such that the text on the canvas can still satisfy the
    constraint. There is no batch axis.

    Attributes:
        tokens: `i32[N]`, the whole canvas.
        known: `bool[N]`, positions of the canvas whose tokens are fixed.
        begin: `i32[]`, index of the first token of the constrained text.
        end: `i32[]`, index after its last token.
        start: `i32[]`, the block's first position; all positions before it are fixed.
        given: `i32[W]`, the block's tokens before the draw; an open position has the mask token, or noise.
        open: `bool[W]`, positions of the block for which tokens are drawn; the others keep `given`.
    """

    tokens: Array
    known: Array
    begin: Array
    end: Array
    start: Array
    given: Array
    open: Array


def accepted(link: OnCanvas, tables: tuple[Any, ...], eos: Array, region: Region, weights: Array, cold: Array,
             address: Array, first: Array) -> Array:
    """Returns tokens for the open positions of each block that belong to one text of the language: `i32[R, W]`.

    Args:
        link: the constraint, with fields `[R]`.
        tables: the automata of the policy.
        eos: `i32[R, E]`, end-of-sequence tokens, padded with -1.
        region: the blocks, `[R, ...]`.
        weights: `f32[R, W, V]`, log-weights of the tokens; -inf for banned tokens.
        cold: `bool[R]`: True takes the most likely text, False samples one.
        address: `u32[R, W, 2]`, addresses of the random numbers.
        first: `i32[R, W]`, the result for rows without a constraint.
    """
    table: TokenTable = tables[link.place]
    # A block may reach beyond the last token that a row may have.
    region = region.replace(end=jnp.minimum(region.end, link.end))
    found = jax.vmap(lambda *row: _row(table, link.whole, *row))(link.start, eos, region, weights, cold, address)
    return jnp.where(link.start[:, None] < 0, first, found)


def _row(table: TokenTable, whole: bool, start: Array, eos: Array, region: Region, weights: Array, cold: Array,
         address: Array) -> Array:
    classes = table.classes.astype(jnp.int32)
    states, columns = table.next.shape
    following = table.next.astype(jnp.int32)
    # After an end of sequence only further ones may follow.
    ends = (jnp.arange(classes.shape[0]) == eos[:, None]).any(0)
    last = jnp.argmax((table.distance == 0) & (following < 0).all(1))
    closed = jnp.zeros(columns, bool).at[jnp.where(ends, classes, columns)].set(True, mode="drop")
    following = jnp.where(closed.any(), following.at[last].set(jnp.where(closed, last, -1)), following)
    dead = -jnp.inf

    def move(state: Array, token: Array) -> Array:
        return jnp.where(state < 0, state, following[jnp.maximum(state, 0), classes[jnp.maximum(token, 0)]])

    # The state before the block.
    place = jnp.arange(region.tokens.shape[0], dtype=jnp.int32)
    front = (place >= region.begin) & (place < region.start)
    here = lax.scan(lambda s, x: (jnp.where(x[0], move(s, x[1]), s), None), start, (front, region.tokens))[0]

    # The states from which the text can be completed after the block.
    W = region.given.shape[0]
    at = region.start + jnp.arange(W, dtype=jnp.int32)
    stop = jnp.minimum(region.start + W, region.end)
    goes = jnp.where(following >= 0, following, states)
    if whole:
        final = jnp.where(closed.any(), goes[:, jnp.argmax(closed)] < states, table.distance == 0)

        def back(can: Array, x: tuple[Array, Array, Array]) -> tuple[Array, None]:
            position, token, known = x
            wide = jnp.append(can, False)
            any_token = wide[goes].any(1)
            this = wide[goes[:, classes[jnp.maximum(token, 0)]]]
            inside = (position >= stop) & (position < region.end)
            return jnp.where(inside, jnp.where(known, this, any_token), can), None

        can = lax.scan(back, final, (place, region.tokens, region.known), reverse=True)[0]
    else:
        can = table.distance <= region.end - stop

    # Backwards: the total weight of the texts from each state on. It is computed by classes, since tokens of a class
    # lead to the same state.
    by_class = jax.vmap(lambda w: jax.ops.segment_max(w, classes, columns))(weights)
    top = jnp.where(jnp.isfinite(by_class), by_class, 0)
    sums = jax.vmap(lambda w, top: jax.ops.segment_sum(jnp.exp(w - top[classes]), classes, columns))(weights, top)
    by_class = jnp.where(cold, by_class, jnp.where(sums > 0, top + jnp.log(jnp.maximum(sums, 1e-37)), dead))
    fixed = jnp.where(jnp.arange(columns) == classes[jnp.maximum(region.given, 0)][:, None], 0.0, dead)
    by_class = jnp.where(region.open[:, None], by_class, fixed)
    counts = (at >= region.begin) & (at < region.end)

    def before(reach: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        weight, counted = x
        total = weight[None] + jnp.append(reach, dead)[goes]
        most = total.max(1)
        shift = jnp.where(most == dead, 0, most)
        added = shift + jnp.log(jnp.exp(total - shift[:, None]).sum(1))
        new = jnp.where(counted, jnp.where(cold, most, added), reach)
        return new, reach

    _, reach = lax.scan(before, jnp.where(can, 0.0, dead), (by_class, counts), reverse=True)

    def forward(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        weight, reach, given, open_, counted, noise = x
        ahead = jnp.append(reach, dead)[goes[jnp.maximum(state, 0)]][classes]
        score = jnp.where(state < 0, dead, jnp.where(ahead > dead, weight + ahead, dead))
        drawn = jnp.where(cold, winner(score), draw(score, noise))
        token = jnp.where(open_ & counted, drawn, given)
        moved = jnp.where(token < 0, -1, move(state, token))
        return jnp.where(counted, moved, state), token

    tokens = lax.scan(forward, here, (weights, reach, region.given, region.open, counts, address))[1]
    lost = (tokens == DEAD_END).any()
    return jnp.where(lost & region.open, DEAD_END, tokens)
