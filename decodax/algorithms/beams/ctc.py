"""Prefix beam search over the outputs of a CTC model, with a language model (Deep Speech 2: Amodei et al., 2016).

A CTC model gives a distribution over symbols and a blank for each frame. An alignment is a sequence of such outputs; it
becomes a text when repeated symbols are joined and blanks dropped. The probability of a text is the sum over its
alignments. The search keeps the best texts so far (prefixes), each with the probabilities of its alignments that end
with a blank and of those that do not. Its score is `log p_ctc(y | x) + alpha log p_lm(y) + beta words(y)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.registry import FUNCTIONS
from decodax.common.struct import Struct, struct

Language = Callable[[Array, Array], Array]
"""A function from a prefix `i32[L]` and its length `i32[]` to the log-probability of each next symbol, `f32[V]`. A
model of words returns 0 for symbols inside a word, and the word's log-probability for the symbol that ends it."""


@struct
class CTCBeams(Struct):
    """Texts of each row, the best first.

    Attributes:
        tokens: `i32[B, k, L]`, padded with -1.
        lengths: `i32[B, k]`, number of symbols.
        scores: `f32[B, k]`, scores of the search; -inf: there are no more texts.
        log_ctc: `f32[B, k]`, log-probability of the alignments that were found.
        log_prior: `f32[B, k]`, the rest of the score: language model and number of words.
    """

    tokens: Array
    lengths: Array
    scores: Array
    log_ctc: Array
    log_prior: Array


@struct
class _Beam(Struct):
    """Prefixes of one row. `blank` and `symbol` are `f32[k]`, log-probabilities of the alignments that end with a blank
    and with a symbol."""

    tokens: Array
    lengths: Array
    blank: Array
    symbol: Array
    prior: Array

    @property
    def ctc(self) -> Array:
        return jnp.logaddexp(self.blank, self.symbol)


@FUNCTIONS.register("algorithms.beams.ctc.ctc_beam_search",
                    "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin", "Amodei et al. 2016")
@functools.partial(jax.jit, static_argnames=("width", "blank", "language", "words", "longest"))
def ctc_beam_search(log_probs: Array, frames: Array, width: int = 16, *, blank: int = 0,
                    language: Language | None = None, alpha: Array | float = 1.0, beta: Array | float = 0.0,
                    words: tuple[int, ...] | None = None, longest: int | None = None) -> CTCBeams:
    """Returns the best texts for the outputs of a CTC model, by prefix beam search with an optional language model.

    The result is exact if `width` is at least the number of prefixes; otherwise some alignments are missing in the
    sums, as in the paper.

    Args:
        log_probs: `f32[B, T, V]`, log-probabilities of the symbols in each frame.
        frames: `i32[B]`, number of frames of each row; later ones are ignored.
        width: number of prefixes `k`.
        blank: id of the blank.
        language: the language model, a `Language`; None: none.
        alpha: weight of the language model.
        beta: weight of the number of words.
        words: symbols that end a word, such as the space; None: each symbol is a word. The last word of a text counts
            only if such a symbol follows it.
        longest: largest number of symbols of a text; default `T`.

    >>> x = jnp.log(jnp.array([[[.4, .6], [.4, .6]]]))          # symbols: blank and 1
    >>> out = ctc_beam_search(x, jnp.array([2]), 4)
    >>> out.tokens[0, 0].tolist(), round(float(jnp.exp(out.log_ctc[0, 0])), 2)
    ([1, -1], 0.84)
    """
    T, V = log_probs.shape[1:]
    if width < 1:
        raise ValueError(f"width: got {width}, takes at least 1")
    if not 0 <= blank < V:
        raise ValueError(f"blank: got {blank}, takes one of {V} symbols")
    L = T if longest is None else longest
    counts = jnp.ones(V, jnp.float32) if words is None else jnp.zeros(V, jnp.float32).at[jnp.array(words, int)].set(1)

    def prior(beam: _Beam) -> Array:
        """Returns the amount that each next symbol adds to the score, without the CTC model's part: `f32[k, V]`."""
        new = jnp.broadcast_to(beta * counts, (width, V))
        if language is None:
            return new
        return new + alpha * jax.vmap(language)(beam.tokens, beam.lengths)

    def frame(beam: _Beam, given: tuple[Array, Array]) -> tuple[_Beam, None]:
        log_p, inside = given
        new = _extended(beam, log_p, prior(beam), blank)
        return jax.tree.map(lambda a, b: jnp.where(inside, a, b), new, beam), None

    def row(log_p: Array, count: Array) -> CTCBeams:
        none = jnp.full(width, -jnp.inf, jnp.float32)
        first = _Beam(tokens=jnp.full((width, L), -1, jnp.int32), lengths=jnp.zeros(width, jnp.int32),
                      blank=none.at[0].set(0), symbol=none, prior=jnp.zeros(width, jnp.float32))
        beam = lax.scan(frame, first, (log_p.astype(jnp.float32), jnp.arange(T) < count))[0]
        there = beam.ctc > -jnp.inf
        beam = beam.replace(tokens=jnp.where(there[:, None], beam.tokens, -1),
                            lengths=jnp.where(there, beam.lengths, 0))
        return CTCBeams(tokens=beam.tokens, lengths=beam.lengths, scores=beam.ctc + beam.prior, log_ctc=beam.ctc,
                        log_prior=beam.prior)

    return jax.vmap(row)(log_probs, frames)


def _extended(beam: _Beam, log_p: Array, prior: Array, blank: int) -> _Beam:
    """Returns the best prefixes after one more frame with log-probabilities `log_p` (`f32[V]`)."""
    k, L = beam.tokens.shape
    V = log_p.shape[0]
    rows = jnp.arange(k)
    newest = jnp.where(beam.lengths > 0, beam.tokens[rows, jnp.maximum(beam.lengths - 1, 0)], -1)
    again = jnp.where(newest >= 0, log_p[jnp.maximum(newest, 0)], -jnp.inf)
    # a prefix stays as it is by a blank, or by its last symbol again
    stays_blank, stays_symbol = beam.ctc + log_p[blank], beam.symbol + again
    # it grows by a symbol; by its last one only after a blank
    grown = jnp.where(newest[:, None] == jnp.arange(V), beam.blank[:, None], beam.ctc[:, None]) + log_p
    grown = grown.at[:, blank].set(-jnp.inf)
    grown = jnp.where((beam.lengths < L)[:, None], grown, -jnp.inf)

    # where the grown prefix is another prefix of the beam, the two are merged: entry [i, j] says that i grows to j
    place = jnp.arange(L)
    inside = place < beam.lengths[:, None, None]
    same = (~inside | (beam.tokens[:, None] == beam.tokens[None])).all(-1)
    child = same & (beam.lengths[None] == beam.lengths[:, None] + 1) & (beam.ctc > -jnp.inf)[None]
    child &= (beam.ctc > -jnp.inf)[:, None]
    into = jnp.where(child, jnp.take_along_axis(grown, jnp.maximum(newest, 0)[None].repeat(k, 0), 1), -jnp.inf)
    stays_symbol = jnp.logaddexp(stays_symbol, jax.nn.logsumexp(into, 0))
    taken = jnp.zeros((k, V), bool).at[rows[:, None], jnp.maximum(newest, 0)[None]].max(child)
    grown = jnp.where(taken, -jnp.inf, grown)

    scores = jnp.concatenate([jnp.logaddexp(stays_blank, stays_symbol)[:, None] + beam.prior[:, None],
                              grown + beam.prior[:, None] + prior], 1)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    value, best = lax.top_k(scores.reshape(-1), k)
    of, what = best // (V + 1), best % (V + 1) - 1
    grows = (what >= 0) & (value > -jnp.inf)
    symbol = jnp.maximum(what, 0)
    tokens, length = beam.tokens[of], beam.lengths[of]
    at = jnp.where(grows, length, L)
    return _Beam(tokens=tokens.at[rows, at].set(symbol, mode="drop"), lengths=length + grows,
                 # unused places are empty: they are no second copies of a prefix
                 blank=jnp.where(grows | (value == -jnp.inf), -jnp.inf, stays_blank[of]),
                 symbol=jnp.where(grows, grown[of, symbol], jnp.where(value > -jnp.inf, stays_symbol[of], -jnp.inf)),
                 prior=beam.prior[of] + jnp.where(grows, prior[of, symbol], 0))
