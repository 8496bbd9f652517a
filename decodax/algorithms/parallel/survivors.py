"""The lattice of a cascade: the n-grams that are kept at each position of a text, and the scores of steps between them.

Axes: P prompts, L positions, K kept n-grams of a position, m tokens of an n-gram, V vocabulary. Column `l` has the
n-grams that begin at position `l`. A step goes from an n-gram of one column to an n-gram of the next; the two together
are an n-gram of one token more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.parallel.max_plus import best_path, max_marginals
from decodax.common.struct import Struct, struct
from decodax.pallas_kernels.vocabulary import top_k

EPSILON = -1
"""Symbol for the positions after the end of a text."""


@struct
class Bounds(Struct):
    """Bounds on the length of each prompt's texts, in tokens with the end token.

    Attributes:
        least: `i32[P]`, smallest length.
        most: `i32[P]`, largest length.
        words: `i32[P]`, largest number of tokens without the end token: `most - 1` if texts must end, otherwise `most`.
        eos: `i32[P, E]`, end tokens, padded with -1.
    """

    least: Array
    most: Array
    words: Array
    eos: Array

    def ends(self, tokens: Array) -> Array:
        """Returns whether each token is an end token of its prompt: `bool[P, ...]` from `i32[P, ...]`."""
        eos = self.eos.reshape(self.eos.shape[0], *[1] * (tokens.ndim - 1), -1)
        return (tokens[..., None] == eos).any(-1) & (tokens >= 0)

    def legal(self, tokens: Array, place: Array) -> Array:
        """Returns whether tokens (`i32[P, ...]`) are allowed at positions `place` (`i32[...]`, from 0 at the first new
        token) of a text: by its smallest length for end tokens, and by its largest length. `bool[P, ...]`."""
        wide = lambda x: x.reshape(-1, *[1] * (tokens.ndim - 1))
        end = (place >= wide(self.least) - 1) & (place < wide(self.most))
        return jnp.where(tokens == EPSILON, place >= wide(self.least),
                         jnp.where(self.ends(tokens), end, place < wide(self.words)))


def first(log_p: Array, bounds: Bounds, keep: int, room: int) -> tuple[Array, Array]:
    """Returns the tokens that are kept at order 0.

    Args:
        log_p: `f32[P, L, V]`, log-probabilities at each position by itself.
        bounds: bounds on the lengths.
        keep: `K`, number of tokens that each position keeps.
        room: largest number of tokens of an n-gram.

    Returns:
        The n-grams `i32[P, L, K, room]` and their scores `f32[P, L, K]`, fields of `Survivors`. A score is the
        log-probability at position 0, and 0 at later positions; unused places have -inf.
    """
    P, L, V = log_p.shape
    names = jnp.broadcast_to(jnp.append(jnp.arange(V, dtype=jnp.int32), EPSILON), (P, L, V + 1))
    own = jnp.concatenate([log_p, jnp.zeros((P, L, 1), log_p.dtype)], -1)
    legal = bounds.legal(names, jnp.arange(L, dtype=jnp.int32)[:, None])
    # the end survives wherever it may stand, as epsilon does
    rank = jnp.where(legal, jnp.where(bounds.ends(names) & (own > -jnp.inf), 0, own), -jnp.inf)
    best, index = top_k(rank, min(keep, V + 1))
    spare = ((0, 0), (0, 0), (0, keep - best.shape[-1]))
    best, index = jnp.pad(best, spare, constant_values=-jnp.inf), jnp.pad(index, spare)
    said = jnp.take_along_axis(own, index, -1).at[:, 1:].set(0)
    grams = jnp.zeros((P, L, keep, room), jnp.int32).at[..., 0].set(jnp.take_along_axis(names, index, -1))
    return grams, jnp.where(best > -jnp.inf, said, -jnp.inf)


def edges(log_p: Array, grams: Array, score: Array, bounds: Bounds, order: int) -> Array:
    """Returns the amount that each step adds to the score of a text, `f32[P, L - m, K, K]`: entry `[p, l, i, j]` is for
    the step from n-gram `i` at position `l` to n-gram `j` at the next one; -inf for steps that are not possible.
    Letters as in the module's docstring.

    Args:
        log_p: `f32[P, L, K, V]`, log-probabilities after each n-gram; at order 0 `f32[P, L, 1, V]`, those at each
            position.
        grams: `i32[P, L, K, m]`, the n-grams, with `m = max(order, 1)`.
        score: `f32[P, L, K]`, their scores.
        bounds: bounds on the lengths.
        order: the Markov order.
    """
    L, m = grams.shape[1], grams.shape[-1]
    before, after = grams[:, :L - m], grams[:, 1:L - m + 1]
    old, new = before[..., -1][..., None], after[..., -1][:, :, None]          # [P, L - m, K, 1], [P, L - m, 1, K]
    place = m + jnp.arange(L - m, dtype=jnp.int32)[:, None, None]
    rows = log_p[:, :L - m] if order else log_p[:, m:]
    shape = jnp.broadcast_shapes(old.shape, new.shape)
    token = jnp.broadcast_to(jnp.maximum(new, 0), (*rows.shape[:3], shape[-1]))
    said = jnp.broadcast_to(jnp.take_along_axis(rows, token, -1), shape)
    # only epsilon follows an end, epsilon, and the last token of the budget
    over = (old == EPSILON) | bounds.ends(old) | (place >= bounds.most.reshape(-1, 1, 1, 1))
    fits = jnp.where(over, new == EPSILON, (new != EPSILON) & bounds.legal(new, place))
    fits &= (before[..., :, None, 1:] == after[..., None, :, :-1]).all(-1)
    fits &= (score[:, :L - m, :, None] > -jnp.inf) & (score[:, 1:L - m + 1, None] > -jnp.inf)
    found = jnp.where(fits, jnp.where(over, 0, said), -jnp.inf)
    return found.at[:, 0].add(score[:, 0, :, None])


def prune(steps: Array, grams: Array, score: Array, order: int) -> tuple[Array, Array]:
    """Keeps the steps with the largest max-marginals of each column, as n-grams of one token more.

    Args:
        steps: `f32[P, L - m, K, K]`, result of `edges` at an order `m` of at least 1.
        grams: `i32[P, L, K, room]`, n-grams of which `m` tokens are valid.
        score: `f32[P, L, K]`, their scores.
        order: `m`.

    Returns:
        The new n-grams and scores, with the shapes of `grams` and `score`. The last `m` columns are unused from then
        on.
    """
    P, C, K, _ = steps.shape
    best, index = top_k(jax.vmap(max_marginals)(steps).reshape(P, C, K * K), K)
    x, y = index // K, index % K
    longer = jnp.take_along_axis(grams[:, :C], x[..., None], 2)
    token = jnp.take_along_axis(grams[:, 1:C + 1, :, order - 1], y, 2)
    alive = best > -jnp.inf
    said = jnp.zeros_like(best).at[:, 0].set(jnp.take_along_axis(steps[:, 0].reshape(P, K * K), index[:, 0], 1))
    return (grams.at[:, :C].set(longer.at[..., order].set(token)),
            score.at[:, :C].set(jnp.where(alive, said, -jnp.inf)))


def best_text(steps: Array, grams: Array) -> tuple[Array, Array, Array]:
    """Returns the best text for `steps` (from `edges`) between the n-grams `grams`.

    Returns:
        Its tokens `i32[P, L]`, with `EPSILON` after its end; the index of its n-gram in each column, `i32[P, L - m +
        1]`; its score `f32[P]`.
    """
    m = grams.shape[-1]
    path, score = jax.vmap(best_path)(steps)
    along = jnp.take_along_axis(grams[:, :path.shape[1]], path[..., None, None], 2)[:, :, 0]
    return jnp.concatenate([along[:, 0], along[:, 1:, m - 1]], 1), path, score
