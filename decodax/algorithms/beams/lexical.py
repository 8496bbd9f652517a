"""Beam searches for texts that contain given phrases: dynamic beam allocation ("Fast Lexically Constrained Decoding
with Dynamic Beam Allocation for Neural Machine Translation", Post and Vilar, 2018) and grid beam search ("Lexically
Constrained Decoding for Sequence Generation Using Grid Beam Search", Hokamp and Liu, 2017)."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.beams.algorithm import BeamSearch, EarlyStopping
from decodax.algorithms.beams.beam_search import BeamStep, largest
from decodax.algorithms.beams.phrases import Cover, Ordered, PhraseProgress, Phrases, Unordered, phrases_of
from decodax.algorithms.beams.step import Group
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.types import Params
from decodax.core.window import take
from decodax.io.appended import appended


@dataclasses.dataclass(frozen=True)
class _Lexical(BeamSearch):
    """Base class of beam searches for texts that contain given phrases."""

    phrases: Phrases = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phrases", phrases_of(self.phrases))
        super().__post_init__()
        for name in ("groups", "uid", "draft"):
            if getattr(self, name) not in (1, None):
                raise ValueError(f"{name}: got {getattr(self, name)!r} with phrases, takes none")

    @property
    def weights(self) -> Any:
        return (*super().weights, self.tables())

    def tables(self) -> Any:
        """Returns the phrases as arrays, which are arguments of the compiled programs."""
        raise NotImplementedError

    def bare(self) -> Self:
        # the compiled program depends on the phrases' lengths only
        return dataclasses.replace(super().bare(), phrases=tuple((0,) * len(p) for p in self.phrases))


@dataclasses.dataclass(frozen=True)
class DynamicBeams(_Lexical):
    """Beam search for texts that contain given phrases, with dynamic beam allocation (Post and Vilar, 2018; phrases in
    any order, stored in a trie: Hu et al., 2019).

    A text cannot end before it has all phrases. The candidates of a step are the best extensions of all beams, the best
    one of each beam, and the tokens that begin or continue a phrase in each beam. Candidates with the same number of
    phrase tokens form a bank. The new beams are taken from the banks in turn, from the one with the most phrase tokens
    down: the best candidate of each bank, then the second best of each, and so on.

    A text that reaches its largest length before it has all phrases is not in the result. If there is no other, the
    result has `Status.DEAD_END`.

    Attributes:
        phrases: tuples of token ids, the same for all prompts; other phrases of the same lengths need no retrace.
        progress: `Unordered()`: phrases in any order, or `Ordered()`: in the given order.
    """

    progress: PhraseProgress = Unordered()

    @property
    def name(self) -> str:
        return f"DynamicBeams({self.width})"

    def tables(self) -> Any:
        return self.progress.table(self.phrases)

    def memory(self, params: Params, like: Array) -> Any:
        return self.progress.start(params.draft[2], like.shape)

    def stepper(self, params: Params, *scored: Any) -> BeamStep:
        return DynamicStep(self, params.draft[2], params.draft[0], *scored)


class _LexicalStep(BeamStep):
    def __init__(self, alg: Any, tables: Any, *rest: Any):
        super().__init__(alg, *rest)
        self.tables = tables

    def barred(self, i: int, g: Group, log_p: Array, met: Array) -> Array:
        """Returns the log-probabilities `f32[P, k, V]` with -inf for end tokens of texts that have not all phrases
        (`met` is False)."""
        ends = (jnp.arange(log_p.shape[-1]) == self.eos[:, i, :, None]).any(1)[:, None] & self.made(i, g)[2][..., None]
        return jnp.where(ends & ~met[..., None], -jnp.inf, log_p)


class DynamicStep(_LexicalStep):
    """A step of `DynamicBeams`: extends each beam by one token. Candidates with equal numbers of phrase tokens form a
    bank, and the new beams are chosen from the banks in turn (see `round_robin`)."""

    def group(self, i: int, g: Group, taken: Array | None) -> tuple[Group, Array]:
        alg, k = self.alg, self.k
        assert isinstance(alg, DynamicBeams)
        log_p = self.barred(i, g, self.at_nodes(i, g), alg.progress.met(self.tables, g.live.memory))
        P, _, V = log_p.shape
        total = self.totals(g, log_p, None)
        ranks = self.ranks(i, g, total)
        best = min(2 * k, k * V)

        # the best of all, the best of each beam, and the tokens that continue a phrase
        beams = jnp.arange(k)
        token, goes_on = alg.progress.next(self.tables, g.live.memory)
        beam, likely = largest(ranks, best)
        index = jnp.concatenate([beam * V + likely, beams * V + jnp.argmax(ranks, -1),
                                 (beams[:, None] * V + jnp.maximum(token, 0)).reshape(P, -1)], 1)
        there = jnp.concatenate([jnp.ones((P, best + k), bool), goes_on.reshape(P, -1)], 1)
        at = lambda x: x[jnp.arange(P)[:, None], index // V, index % V]
        there = there & (at(total) > -jnp.inf)
        order = jnp.lexsort((~there, index), axis=1)
        index, there = take(index, order), take(there, order)
        there = there.at[:, 1:].set(there[:, 1:] & (index[:, 1:] != index[:, :-1]))         # each once

        known = jax.tree.map(lambda x: take(x, index // V), g.live.memory)
        bank = alg.progress.bank(self.tables, alg.progress.advance(self.tables, known, (index % V).astype(jnp.int32)))
        order = round_robin(bank, at(ranks), there)[:, :self.candidates(V)]
        index, there = take(index, order), take(there, order)
        beam, token = index // V, (index % V).astype(jnp.int32)
        text, stop, closed = self.longer(i, g, beam, token, at(log_p), jnp.where(there, at(total), -jnp.inf), log_p)
        met = alg.progress.met(self.tables, text.memory)
        text = text.replace(score=jnp.where(closed & ~met, -jnp.inf, text.score))       # by a stop string

        lives = ~closed & (text.score > -jnp.inf)
        chosen = jnp.argsort(~lives, axis=1, stable=True)[:, :k]
        return self.after(i, g, text, stop, closed | ~lives, met & (jnp.arange(order.shape[1]) < k), chosen), token

    def remember(self, memory: Any, beam: Array, token: Array, own: Array, log_p: Array) -> Any:
        assert isinstance(self.alg, DynamicBeams)
        return self.alg.progress.advance(self.tables, memory, token)


def round_robin(bank: Array, rank: Array, there: Array) -> Array:
    """Returns the order in which candidates are taken, `i32[P, n]`: the best of each bank, from the highest bank down,
    then the second best of each. Candidates for which `there` is False come last.

    >>> import jax.numpy as jnp
    >>> bank, rank = jnp.array([[0, 0, 2, 0, 1]]), jnp.array([[5.0, 4.0, 1.0, 3.0, 2.0]])
    >>> round_robin(bank, rank, jnp.ones((1, 5), bool)).tolist()
    [[2, 4, 0, 1, 3]]
    """
    order = jnp.lexsort((-rank, -bank, ~there), axis=1)
    bank, there = take(bank, order), take(there, order)
    place = jnp.arange(bank.shape[1])
    opens = jnp.concatenate([jnp.ones_like(there[:, :1]), bank[:, 1:] != bank[:, :-1]], 1)
    turn = place - lax.cummax(jnp.where(opens, place, 0), axis=1)
    return take(order, jnp.lexsort((-bank, turn, ~there), axis=1))


@dataclasses.dataclass(frozen=True)
class GridBeams(_Lexical):
    """Grid beam search (Hokamp and Liu, 2017): `k` beams in each cell, where a cell has the texts with the same number
    of phrase tokens, from 0 to all `C`.

    A text is extended by any token and stays in its cell. Or it is extended by the first token of a phrase that it does
    not have yet, or by the next token of an open phrase, and moves to the next cell. An open phrase must be continued.
    A phrase's token may also extend a text as any other token does, without a move. So a cell can have the same tokens
    with different sets of phrases; each combination is kept once. Texts can end only in the last cell.

    Attributes:
        phrases: tuples of token ids, in any order in the text, without overlaps; the same for all prompts.
        beams: `k`, number of beams of each cell, and size of the pool; `width` is computed from it.
    """

    width: int = 1
    beams: int = 4

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams: got {self.beams!r}, takes 1 or more")
        object.__setattr__(self, "phrases", phrases_of(self.phrases))
        object.__setattr__(self, "width", self.beams * (1 + sum(map(len, self.phrases))))
        super().__post_init__()
        if self.returns > self.beams:
            raise ValueError(f"returns: got {self.returns} for {self.beams} beams, takes at most that")

    @property
    def name(self) -> str:
        return f"GridBeams({self.beams})"

    def answering(self, count: int) -> BeamSearch:
        if count > self.beams:
            raise ValueError(f"num_samples: got {count} for {self.beams} beams, takes at most as many")
        return dataclasses.replace(self, returns=count)

    def tables(self) -> Any:
        """Returns the phrases as arrays: their tokens, `i32[n, longest]`, padded with 0, and for each of the `n`
        phrases the index of the first phrase equal to it, `i32[n]`."""
        tokens = np.zeros((len(self.phrases), max(map(len, self.phrases))), np.int32)
        for row, phrase in zip(tokens, self.phrases, strict=True):
            row[:len(phrase)] = phrase
        return tokens, np.array([self.phrases.index(p) for p in self.phrases], np.int32)

    def memory(self, params: Params, like: Array) -> Cover:
        none = jnp.zeros(like.shape, jnp.int32)
        return Cover(has=jnp.zeros((*like.shape, len(self.phrases)), bool), phrase=none - 1, at=none, text=none)

    def stepper(self, params: Params, *scored: Any) -> BeamStep:
        return GridStep(self, params.draft[2], params.draft[0], *scored)


class GridStep(_LexicalStep):
    """A step of `GridBeams`: extends the beams by one token. There is a cell for each number of phrase tokens; it keeps
    the `beams` best of the texts from itself (no phrase token added) and from the cell with one phrase token less."""

    def __init__(self, alg: GridBeams, *rest: Any):
        super().__init__(alg, *rest)
        self.places, self.banks = alg.beams, alg.width // alg.beams
        self.lengths = jnp.array([len(p) for p in alg.phrases])

    def group(self, i: int, g: Group, taken: Array | None) -> tuple[Group, Array]:
        b, n = self.places, len(self.lengths)
        tokens, first = map(jnp.asarray, self.tables)
        cover: Cover = g.live.memory                                                    # [P, K, ...]
        log_p = self.barred(i, g, self.at_nodes(i, g), cover.has.all(-1))
        P, K, V = log_p.shape
        total = self.totals(g, log_p, None)
        ranks = self.ranks(i, g, total)

        # any token where no phrase is open; the first of a phrase that the text lacks, of equal ones the first such;
        # or the next one of the open phrase
        free = jnp.where((cover.phrase < 0)[..., None], 0, -jnp.inf)
        which = jnp.arange(n)
        equal = (first == first[:, None]) & (which < which[:, None])
        starts = ~cover.has & ~(equal & ~cover.has[..., None, :]).any(-1) & (cover.phrase < 0)[..., None]
        moves = starts | (which == cover.phrase[..., None])
        step_token = tokens[which, jnp.minimum(cover.at, tokens.shape[1] - 1)[..., None]]        # [P, K, n]
        each = lambda x: jnp.concatenate([
            (x + free).reshape(P, self.banks, -1), self.up(jnp.where(
                moves, jnp.take_along_axis(x, step_token, 2), -jnp.inf).reshape(P, self.banks, -1))], -1)
        token_of = jnp.concatenate([jnp.broadcast_to(jnp.arange(V), (P, K, V)).reshape(P, self.banks, -1),
                                    self.up(step_token.reshape(P, self.banks, -1))], -1)

        # in each cell the best texts, each once for each set of phrases; a text can have come by n + 1 ways
        m = min(self.candidates(V) // self.banks * (n + 1), each(ranks).shape[-1])
        value, index = lax.top_k(each(ranks), m)                                        # [P, banks, m]
        pick = lambda x: jnp.take_along_axis(x, index, 2)
        moved = index >= b * V
        cell = jnp.arange(self.banks)[:, None]
        beam = jnp.where(moved, (index - b * V) // n + jnp.maximum(cell - 1, 0) * b, index // V + cell * b)
        action = jnp.where(moved, (index - b * V) % n, -1)
        flat = lambda x: x.reshape(P, -1)
        token, best = flat(pick(token_of)).astype(jnp.int32), flat(pick(each(total)))
        beam, action = flat(beam), flat(action)
        own = jnp.take_along_axis(log_p.reshape(P, -1), beam * V + token, 1)
        text, stop, closed = self.longer(i, g, beam, token, own, best, log_p)
        after: Cover = self.covered(take_all(cover, beam), action)
        before = take(cover.text, beam)
        once = ~self.repeated(before, token, after, value)
        met = after.has.all(-1)
        text = text.replace(score=jnp.where(once & ~(closed & ~met), best, -jnp.inf),
                            memory=after)

        by_cell = lambda x: x.reshape(P, self.banks, m)
        here = by_cell(text.score > -jnp.inf)
        place = jnp.cumsum(here, -1) - here                 # among the cell's texts
        lives = by_cell(~closed) & here
        chosen = jnp.argsort(~lives, axis=-1, stable=True)[..., :b] + cell * m
        joins = flat(place < b) & met & (jnp.arange(self.banks * m) >= (self.banks - 1) * m)
        g = self.after(i, g, text, stop, closed | ~flat(lives), joins, flat(chosen))
        # live beams whose tokens are equal
        parent, newest = take(before, flat(chosen)), take(token, flat(chosen))
        same = (parent[:, :, None] == parent[:, None]) & (newest[:, :, None] == newest[:, None])
        memory = g.live.memory.replace(text=jnp.argmax(same, -1).astype(jnp.int32))
        return g.replace(live=g.live.replace(memory=memory)), token

    def up(self, x: Array) -> Array:
        """Shifts values by one cell: entry `[p, c]` of the result is `x[p, c - 1]`, and -inf (0 for integers) for the
        first cell. `x` has axes `[P, cells, ...]`."""
        return jnp.concatenate([jnp.full_like(x[:, :1], -jnp.inf if x.dtype == jnp.float32 else 0), x[:, :-1]], 1)

    def covered(self, cover: Cover, action: Array) -> Cover:
        """Returns which phrases the texts contain after one more token. `cover` is the state before it, and `action`
        (`i32[P, n]`) the index of the phrase that the token continues, -1 if it belongs to none."""
        at = jnp.where(action >= 0, cover.at + 1, 0)
        whole = (action >= 0) & (at == self.lengths[jnp.maximum(action, 0)])
        has = cover.has | (whole[..., None] & (jnp.arange(len(self.lengths)) == action[..., None]))
        return cover.replace(has=has, phrase=jnp.where(whole, -1, action), at=jnp.where(whole, 0, at))

    def repeated(self, text: Array, token: Array, cover: Cover, value: Array) -> Array:
        """Returns True for candidates that have the same tokens and phrases as a better candidate of their cell,
        `bool[P, cells * m]`.

        Args:
            text: `i32[P, cells * m]`, a number that is equal for candidates with equal tokens but for the last.
            token: `i32[P, cells * m]`, the last token.
            cover: the phrases that each candidate contains.
            value: `f32[P, cells, m]`, ranks by which the `m` candidates of a cell are sorted; -inf for none.
        """
        P, banks, m = value.shape
        key = jnp.concatenate([text[..., None], token[..., None], cover.phrase[..., None], cover.at[..., None],
                               cover.has.astype(jnp.int32)], -1).reshape(P, banks, m, -1)
        same = (key[:, :, :, None] == key[:, :, None]).all(-1) & (jnp.arange(m) < jnp.arange(m)[:, None])
        return (same & (value > -jnp.inf)[:, :, None]).any(-1).reshape(P, -1)


def take_all(tree: Any, index: Array) -> Any:
    """Returns the pytree `tree`, with leaves `[P, k, ...]`, at `index` (`i32[P, n]`) of the second axis: leaves `[P, n,
    ...]`."""
    return jax.tree.map(lambda x: take(x, index), tree)


@ALGORITHMS.register("dynamic-beam-allocation", "Fast Lexically Constrained Decoding with Dynamic Beam Allocation for "
                     "Neural Machine Translation", "Post & Vilar 2018", family="search", needs="a model")
def dynamic_beam_allocation(lm: Any, phrases: Any, width: Count = 4, ordered: bool = False,
                            length_penalty: float = 1.0, early_stopping: EarlyStopping = False) -> DynamicBeams:
    """Searches for texts that contain given phrases, with beams divided by the number of phrase tokens in a text.

    The cost does not depend on the number of phrases.

    Args:
        phrases: list of phrases, each a text or a list of token ids. A text is tokenized as a part of a longer text, so
            a leading space is part of it.
        width: number of beams of a prompt.
        ordered: True: the phrases appear in the given order. False: in any order.
        length_penalty: exponent of the length by which a score is divided.
        early_stopping: when the search ends, see `beam-search`.
    """
    return DynamicBeams(width, phrases=_encoded(lm, phrases), length_penalty=length_penalty,
                        progress=Ordered() if ordered else Unordered(), early_stopping=early_stopping)


@ALGORITHMS.register("grid-beam-search",
                     "Lexically Constrained Decoding for Sequence Generation Using Grid Beam Search",
                     "Hokamp & Liu 2017", family="search", needs="a model")
def grid_beam_search(lm: Any, phrases: Any, beams: Count = 4, length_penalty: float = 1.0,
                     early_stopping: EarlyStopping = False) -> GridBeams:
    """Searches for texts that contain given phrases, with beams for each number of phrase tokens.

    The cost grows with the number of phrase tokens; `dynamic-beam-allocation` is cheaper.

    Args:
        phrases: list of phrases, each a text or a list of token ids.
        beams: number of beams for each number of phrase tokens.
        length_penalty: exponent of the length by which a score is divided.
        early_stopping: when the search ends, see `beam-search`.
    """
    return GridBeams(phrases=_encoded(lm, phrases), beams=beams, length_penalty=length_penalty,
                     early_stopping=early_stopping)


def _encoded(lm: Any, given: Any) -> Any:
    """Returns phrases as token ids. Texts are tokenized as parts of a longer text."""
    if not given:
        raise ValueError(f"phrases: got {given!r}, takes a list of texts or of lists of token ids")
    if isinstance(given, str):
        given = [given]
    if (text := next((p for p in given if isinstance(p, str)), None)) is not None and lm.tokenizer is None:
        raise ValueError(f"phrases: got {text!r} for a model without a tokenizer; takes lists of token ids")
    encode = lambda p: appended(lm.tokenizer, None, p) if isinstance(p, str) else p
    return tuple(tuple(encode(p)) for p in given)
